"""Every bound on waiting, derived from the one that the user sets. Pure arithmetic.

A hierarchy of timeouts that users tune by hand contradicts itself sooner or later (torchtitan issue
2899). Here ``failure_timeout_seconds`` is the one choice; the rest follows, and is logged once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_RECENT_STEPS = 20


@dataclass(frozen=True)
class Bounds:
    """Bounds in seconds, all functions of ``failure``."""

    failure: float
    """A silent domain is waited for so long (``failure_timeout_seconds``)."""

    @property
    def heartbeat(self) -> float:
        """Between two signs of life: several fit into ``failure``."""
        return self.failure / 5

    @property
    def late(self) -> float:
        """A live domain that does not come to form a generation is waited for so long. More than the
        longest time that leaving a broken step takes: without it, it would lose its state."""
        return max(4 * self.failure, 5.0)

    @property
    def acknowledge(self) -> float:
        """For all members to acknowledge a proposal: who is there needs milliseconds."""
        return max(2 * self.failure, 3.0)

    @property
    def rebuild(self) -> float:
        """For one stage of a rebuild. Deaths end it at once; this is for what no socket tells."""
        return max(10 * self.failure, 30.0)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"failure_timeout_seconds {self.failure:g}: heartbeat every {self.heartbeat:g} s, "
            f"acknowledgement within {self.acknowledge:g} s, late domains waited for {self.late:g} s, "
            f"each stage of a rebuild within {self.rebuild:g} s"
        )


class StepBound:
    """How long a step may go on without progress.

    Args:
        bounds: the others.
        fixed: ``step_timeout_seconds``; 0 follows the measured steps.
        first: bound before a step has been measured in this process (compilation, first touch).
    """

    def __init__(self, bounds: Bounds, *, fixed: float, first: float) -> None:
        self._least = 4 * bounds.failure
        self._fixed = fixed
        self._first = max(first, fixed)
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def measured(self, seconds: float) -> None:
        """A step took so long."""
        self._recent.append(seconds)

    def of(self, *, first: bool) -> float:
        """The bound now; ``first`` for the first step of a generation, which may compile."""
        if not self._recent:
            return self._first
        if self._fixed:
            return self._fixed
        bound = max(5 * max(self._recent), self._least)
        return max(bound, self._first / 10) if first else bound
