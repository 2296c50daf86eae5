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
from dataclasses import dataclass, replace
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
    extra: tuple[int, ...] = ()
    """Owners whose shards were handed over by domains that left, beyond what the copies cover."""


class Ledger:
    """What one rank could bring into the next generation, and the only ways in which that changes.

    The tensors lie elsewhere (:class:`recovery.state.Salvage`); this is the account of them. State of
    the last generation is kept until the present one has committed a step: until then some other rank
    may not have restored its part.
    """

    def __init__(self) -> None:
        self._held: dict[int, HeldState] = {}
        self._present: int | None = None

    @property
    def held(self) -> tuple[HeldState, ...]:
        """What to report."""
        return tuple(self._held.values())

    @property
    def committed(self) -> int:
        """The last step committed by the state of the present generation, or of the last one."""
        return max((h.committed for h in self._held.values()), default=0)

    def settle(self, decision: Decision) -> bool:
        """Act on what was decided when the next generation was formed.

        Returns:
            Whether the prepared step of ``decision.generation`` must be applied now.
        """
        self._present = None
        if decision.action == "lost":
            return False  # kept: should the way back to a checkpoint fail, it is still lost
        kept = self._held.get(decision.generation)
        self._held = {}
        if kept is None:
            return False
        assert kept.committed <= decision.step <= max(kept.prepared, kept.committed), (
            kept,
            decision,
        )
        self._held[kept.generation] = replace(kept, committed=decision.step, prepared=decision.step)
        return kept.committed < decision.step

    def restored(self, generation: int, domains: tuple[str, ...], copies: int, step: int) -> None:
        """The state of ``step`` is in place in the layout of ``generation``."""
        self._present = generation
        self._held[generation] = HeldState(generation, domains, copies, step, step)

    def prepare(self, step: int) -> None:
        """This rank has everything that the update of ``step`` needs."""
        self._change(prepared=step)

    def commit(self, step: int) -> None:
        """The vote passed, and the update is applied."""
        self._change(committed=step, prepared=step)
        assert self._present is not None
        self._held = {self._present: self._held[self._present]}

    def take_over(self, owner: int) -> None:
        """The shard of ``owner``, a domain that leaves, is here."""
        assert self._present is not None
        self._change(extra=(*self._held[self._present].extra, owner))

    def _change(self, **values: Any) -> None:
        assert self._present is not None, "nothing is restored yet"
        self._held[self._present] = replace(self._held[self._present], **values)


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
    return HeldState(
        **{**data, "domains": tuple(data["domains"]), "extra": tuple(data.get("extra", ()))}
    )


Action = Literal["start", "rerun", "roll_forward", "lost"]


@dataclass(frozen=True)
class Decision:
    """What every member of the new generation does before its first step; the same for all."""

    action: Action
    generation: int = 0
    """Generation whose held state is used; 0 for start and lost."""
    step: int = 0
    """The step that is committed once the action is done; the last one there was, if lost."""
    lost: tuple[str, ...] = ()
    """Domains whose shards nobody has (action lost)."""


def merge(ranks: Sequence[Sequence[HeldState]]) -> tuple[HeldState, ...]:
    """A domain's state from its ranks': only what all of them have, at the least advanced point.

    ``committed`` is the furthest of its ranks (they too can roll forward), ``prepared`` the least.
    """
    merged = []
    for first in ranks[0] if ranks else ():
        same = [h for rank in ranks for h in rank if h.generation == first.generation]
        if len(same) == len(ranks):
            merged.append(
                HeldState(
                    generation=first.generation,
                    domains=first.domains,
                    copies=first.copies,
                    committed=max(h.committed for h in same),
                    prepared=min(h.prepared for h in same),
                    extra=tuple(sorted(set.intersection(*(set(h.extra) for h in same)))),
                )
            )
    return tuple(merged)


def decide(reports: Sequence[Report]) -> Decision:
    """The one decision all members derive from the same reports.

    Members without state are newcomers and only receive (what a process slept with is left out of the
    world's reports: see ``membership/formation.py``). The newest generation counts that everybody has
    restored: a survivor keeps the state of the last generation until the new one has committed a step,
    so there always is one. Who has nothing that old came later, and only receives too.
    """
    survivors = [r for r in reports if r.held]
    if not survivors:
        return Decision("start")
    has = [{h.generation for h in r.held} for r in survivors]
    generation = max(g for g in set.union(*has) if all(g in mine for mine in has if min(mine) <= g))
    states = {r.domain: h for r in survivors for h in r.held if h.generation == generation}
    any_state = next(iter(states.values()))
    domains, copies = any_state.domains, any_state.copies
    committed = max(h.committed for h in states.values())
    prepared = min(h.prepared for h in states.values())
    live = [i for i, name in enumerate(domains) if name in states]
    extra = {owner for h in states.values() for owner in h.extra}
    lost = [i for i in lost_owners(live, len(domains), copies) if i not in extra]
    if lost:
        return Decision("lost", step=committed, lost=tuple(domains[i] for i in lost))
    if committed > min(h.committed for h in states.values()) or prepared > committed:
        step = max(committed, prepared)
        assert prepared >= step, (
            f"someone committed step {step}, but not all are prepared: {states}"
        )
        return Decision("roll_forward", generation=generation, step=step)
    return Decision("rerun", generation=generation, step=committed)
