"""How a proposal becomes a generation. Pure decisions of one domain; no clocks and no sockets here.

A witness (the lighthouse, or etcd) proposes: it says who asks to be in the next generation. A proposal
counts once every domain it chooses has acknowledged the same content. What must never happen is two
worlds side by side; hence the rules, all of them functions of the proposal's content alone, so that
all who see the same proposal choose the same world:

1. The *carriers* of a proposal are the members of the newest generation that any candidate knows of.
   Everyone else is a newcomer, whatever old state it has: that is the fence for processes that slept.
2. More than half of that generation's members must be among the carriers, so that two successors would
   share a member, who acknowledges one of them only; or
3. with half or fewer, the witness must vouch that nobody went on without them. A store with
   compare-and-swap does. A lighthouse counts the changes of its quorum: if there was exactly one since
   a carrier was last asked for its consent, nothing can have been formed in between.
4. Numbers only grow: the next is one above the highest that any candidate has ever tried.

A member that turned out to be beyond the reach of another is left out in the next attempt, if rule 2
still holds without it. Source: this is the reconfiguration chain of virtual synchrony (Birman), with
a witness for the case that a majority is gone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .world import World


@dataclass(frozen=True, slots=True)
class Formed:
    """The last generation that a process was a member of."""

    generation: int
    ids: tuple[str, ...]
    """Of its members, the leaders' process ids."""
    witness: int
    """The witness's count of changes when it was proposed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one domain says of itself when it asks to be in the next generation."""

    id: str
    """Unique per process: an earlier life of a domain must never be mistaken for it."""
    domain: str
    ranks: int
    store_address: str
    """host:port of the TCPStore it would host a generation on."""
    address: str
    """host:port where it answers whether it is alive."""
    reports: Any = ()
    """What its ranks hold; opaque here."""
    attempted: int = 0
    """The highest generation number it has ever tried."""
    formed: Formed | None = None
    consented: int = 0
    """The witness's count when it was last chosen: nothing up to there was formed without it."""
    unreachable: tuple[str, ...] = ()
    """Ids of those that did not acknowledge its last attempt."""
    leaving: bool = False
    """It has handed over its state, and only says goodbye."""
    giving_up: bool = False
    """It has waited long enough for ``min_domains`` domains."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types, for the wire."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Candidate:
        """Back from the wire."""
        formed = data["formed"]
        if formed is not None:
            formed = Formed(formed["generation"], tuple(formed["ids"]), formed["witness"])
        return Candidate(**{**data, "formed": formed, "unreachable": tuple(data["unreachable"])})


@dataclass(frozen=True, slots=True)
class Wait:
    """The proposal makes no world for this domain."""

    reason: str
    for_domains: bool = False
    """Whether ``min_domains`` is what is missing."""


class Formation:
    """The part one domain plays in forming generations.

    Args:
        me: this domain; only its first five fields count.
        domains: how many domains to wait for before the first generation.
        min_domains: fewer than these wait for more.
        arbiter: whether the witness lets one successor of a generation through, and no second
            (compare-and-swap).
    """

    def __init__(
        self, me: Candidate, *, domains: int, min_domains: int = 1, arbiter: bool = False
    ) -> None:
        self._me = me
        self._domains = domains
        self._min_domains = min_domains
        self._arbiter = arbiter

    @property
    def formed(self) -> Formed | None:
        """The last generation this domain was a member of."""
        return self._me.formed

    def candidate(
        self, reports: Any, *, leaving: bool = False, giving_up: bool = False
    ) -> Candidate:
        """What to tell the witness now."""
        return replace(self._me, reports=reports, leaving=leaving, giving_up=giving_up)

    def consider(self, witness: int, candidates: Sequence[Candidate]) -> World | Wait:
        """The world that this proposal makes, to be acknowledged; or why there is none for us.

        Raises:
            ValueError: if the domains of a run that has not begun differ in size.
        """
        choice = choose(
            witness,
            candidates,
            domains=self._domains,
            min_domains=self._min_domains,
            arbiter=self._arbiter,
        )
        # What one could not reach is news for one attempt only.
        self._me = replace(self._me, unreachable=())
        if isinstance(choice, Wait):
            return choice
        if self._me.id not in choice.ids:
            return Wait(f"the generation of domains {', '.join(choice.domains)} to count it in")
        self._me = replace(self._me, attempted=choice.generation, consented=witness)
        return replace(choice, ft_index=choice.ids.index(self._me.id))

    def acknowledged(self, world: World, missing: Collection[str]) -> bool:
        """Whether ``world`` exists: all have acknowledged it but those with the ids ``missing``."""
        if missing:
            self._me = replace(self._me, unreachable=tuple(sorted(missing)))
            return False
        self._me = replace(self._me, formed=Formed(world.generation, world.ids, self._me.consented))
        return True


def choose(
    witness: int,
    candidates: Sequence[Candidate],
    *,
    domains: int,
    min_domains: int = 1,
    arbiter: bool = False,
) -> World | Wait:
    """The world that a proposal makes, the same for all who see it (``ft_index`` is left at 0)."""
    live = sorted(candidates, key=lambda c: (natural(c.domain), c.id))
    last = max((c.formed for c in live if c.formed), key=lambda f: f.generation, default=None)
    members = frozenset(last.ids) if last else frozenset()

    live = _reachable(live, members)
    twins = {c.domain for c in live if sum(o.domain == c.domain for o in live) > 1}
    if twins and last is None:
        return Wait(f"the earlier process of domain {', '.join(sorted(twins))} to be forgotten")
    live = [c for c in live if c.domain not in twins or c.id in members]
    carriers = [c for c in live if c.id in members]
    sizes = {c.ranks for c in (carriers or live)}
    if len(sizes) > 1:
        raise ValueError(
            "domains differ in size: "
            + ", ".join(f"{c.domain} has {c.ranks} ranks" for c in (carriers or live))
        )
    live = [c for c in live if c.ranks in sizes]
    chosen = [c for c in live if not c.leaving]
    generation = 1 + max((c.attempted for c in live), default=0)

    if last is None:
        # Once all were there, a death before the first step must not make the others wait for it.
        if generation == 1 and len(chosen) < domains:
            return Wait(f"{domains} domains, {len(chosen)} here")
    elif 2 * len(carriers) <= len(members) and not arbiter:
        known = max((c.consented for c in carriers), default=0)
        silent = all(c.id not in members or c in carriers for c in candidates)
        if not (silent and last.witness < witness <= known + 1):
            return Wait(
                f"more of the {len(members)} domains of generation {last.generation}: "
                f"{len(carriers)} are no majority, and the others may be going on without them"
            )
    if not chosen:
        return Wait("a domain that does not leave")
    if len(chosen) < min_domains and not any(c.giving_up for c in chosen):
        return Wait(f"at least {min_domains} domains, {len(chosen)} here", for_domains=True)
    return World(
        generation=generation,
        domains=tuple(c.domain for c in chosen),
        ft_index=0,
        local_rank=0,
        ranks_per_domain=chosen[0].ranks,
        outer=1,
        store_address=chosen[0].store_address,
        reports=tuple(c.reports if c.id in members else () for c in chosen),
        ids=tuple(c.id for c in chosen),
        addresses=tuple(c.address for c in chosen),
        newcomers=tuple(c.domain for c in chosen if last is not None and c.id not in members),
        giving_up=len(chosen) < min_domains,
    )


def _reachable(live: Sequence[Candidate], members: Collection[str]) -> list[Candidate]:
    """``live`` without as few as possible, such that nobody left has missed another."""
    left = list(live)
    while True:
        apart = {
            c.id: sum(o.id in c.unreachable or c.id in o.unreachable for o in left) for c in left
        }
        # Newcomers go first, then those who come last.
        worst = max(reversed(left), key=lambda c: (apart[c.id], c.id not in members), default=None)
        if worst is None or not apart[worst.id]:
            return left
        left.remove(worst)


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts domain "10" after "9"."""
    return [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    ]
