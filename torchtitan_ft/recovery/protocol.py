"""What survivors do with a broken step. Pure decisions from what they report; no torch here.

The two facts everything rests on:

1. A rank votes only once it is *prepared* (own reduced gradient, gradients of the shards it holds,
   loss and norm, all finite), and commits only after a vote in which every rank took part. So if
   anybody, dead or alive, committed step t, every survivor is prepared for t.
2. If every survivor is prepared for t, all of them can apply it without any further message.

Hence: all prepared (or committed) -> roll forward; otherwise nobody has committed -> run t again.
That is the termination rule of two-phase commit, and needs no word from the dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..redundancy.placement import lost_owners


@dataclass(frozen=True)
class HeldState:
    """State of one generation that a domain still has in memory."""

    generation: int
    """Generation whose layout the shards follow."""
    domains: tuple[str, ...]
    """Its domains, by index along the ft axis."""
    copies: int
    """Extra copies of every shard in it."""
    committed: int
    """Last step applied to these shards; 0 before the first."""
    prepared: int
    """Step for which the gradients are complete, or the committed one when there is none."""


@dataclass(frozen=True)
class Report:
    """What one domain says of itself when it asks to join. ``held`` is empty for a newcomer."""

    domain: str
    held: tuple[HeldState, ...] = ()


def read_reports(domains: Sequence[str], reports: Sequence[Any]) -> list[Report]:
    """What the domains said when they joined: per domain a list of ranks, per rank a list of
    :class:`HeldState` as JSON."""
    return [
        Report(domain, merge([[_held(h) for h in rank] for rank in ranks]))
        for domain, ranks in zip(domains, reports, strict=True)
    ]


def _held(data: dict[str, Any]) -> HeldState:
    return HeldState(**{**data, "domains": tuple(data["domains"])})


Action = Literal["start", "rerun", "roll_forward", "lost"]


@dataclass(frozen=True)
class Decision:
    """What every member of the new generation does before its first step; the same for all."""

    action: Action
    generation: int = 0
    """Generation whose held state is used; 0 for start and lost."""
    step: int = 0
    """The step that is committed once the action is done."""
    lost: tuple[str, ...] = ()
    """Domains whose shards nobody has (action lost)."""


def merge(ranks: Sequence[Sequence[HeldState]]) -> tuple[HeldState, ...]:
    """A domain's state from its ranks': only what all of them have, at the least advanced point.

    ``committed`` is the furthest of its ranks (they too can roll forward), ``prepared`` the least.
    """
    merged = []
    for first in ranks[0]:
        same = [h for rank in ranks for h in rank if h.generation == first.generation]
        if len(same) == len(ranks):
            merged.append(
                HeldState(
                    generation=first.generation,
                    domains=first.domains,
                    copies=first.copies,
                    committed=max(h.committed for h in same),
                    prepared=min(h.prepared for h in same),
                )
            )
    return tuple(merged)


def decide(reports: Sequence[Report]) -> Decision:
    """The one decision all members derive from the same reports.

    Members that hold state of no generation are newcomers and only receive. Of the generations that
    *every* other member has state of, the newest counts: a survivor keeps the state of the last
    generation until the new one has committed a step, so there always is one unless shards are lost.
    """
    survivors = [r for r in reports if r.held]
    if not survivors:
        return Decision("start")
    common = set.intersection(*({h.generation for h in r.held} for r in survivors))
    if not common:
        # Someone slept through a generation: what is older than the newest state is stale.
        newest = max(h.generation for r in survivors for h in r.held)
        fresh = [
            r if any(h.generation == newest for h in r.held) else Report(r.domain) for r in reports
        ]
        return decide(fresh)
    generation = max(common)
    states = {r.domain: h for r in survivors for h in r.held if h.generation == generation}
    any_state = next(iter(states.values()))
    domains, copies = any_state.domains, any_state.copies
    live = [i for i, name in enumerate(domains) if name in states]
    lost = lost_owners(live, len(domains), copies)
    if lost:
        return Decision("lost", lost=tuple(domains[i] for i in lost))
    committed = max(h.committed for h in states.values())
    prepared = min(h.prepared for h in states.values())
    if committed > min(h.committed for h in states.values()) or prepared > committed:
        step = max(committed, prepared)
        assert prepared >= step, (
            f"someone committed step {step}, but not all are prepared: {states}"
        )
        return Decision("roll_forward", generation=generation, step=step)
    return Decision("rerun", generation=generation, step=committed)
