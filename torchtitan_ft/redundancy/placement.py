"""Who holds copies of whose shards. Pure decisions; no torch here.

Domains are indexed 0..N-1 along the ft axis. With c copies the shard of domain d is also held by
d+1, ..., d+c (mod N): a ring, so that every domain holds as much as every other.
"""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction


def copies_for(overlap: float, domains: int) -> int:
    """Extra copies of every shard: ``min(N - 1, ceil(overlap * N))``.

    The decimal the user wrote is meant, not its binary neighbour: 0.07 * 100 is exactly 7 copies.
    """
    exact = Fraction(str(overlap)) * domains
    ceiling = -(-exact.numerator // exact.denominator)
    return min(domains - 1, ceiling)


def holders_of(owner: int, domains: int, copies: int) -> list[int]:
    """Domains that hold a copy of ``owner``'s shard, nearest first."""
    return [(owner + k) % domains for k in range(1, copies + 1)]


def owners_held_by(holder: int, domains: int, copies: int) -> list[int]:
    """Domains of whose shards ``holder`` has a copy, nearest first."""
    return [(holder - k) % domains for k in range(1, copies + 1)]


def lost_owners(live: Collection[int], domains: int, copies: int) -> list[int]:
    """Owners whose shard nobody alive has: neither the owner nor one of its holders."""
    alive = set(live)
    return [
        owner
        for owner in range(domains)
        if not alive & {owner, *holders_of(owner, domains, copies)}
    ]
