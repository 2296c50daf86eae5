"""Which domain holds the others up. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 5
_RATIO = 1.5
_SHARE = 0.05
"""Of the step: what a straggler takes beyond the others must be worth a word."""
_REMIND_STEPS = 20


@dataclass(frozen=True)
class Straggler:
    """A domain whose own work takes longer than the others'."""

    domain: str
    ratio: float
    """Its layers' forward time over the median of the others'."""
    share: float
    """Its layers' forward time as a share of the step; a backward pass takes about twice as much."""


class Stragglers:
    """Compares the domains' own work over the last steps.

    Args:
        domains: names, by index along the ft axis.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = domains
        self._work: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._quiet = 0

    def measured(self, work: Sequence[float], step: float) -> None:
        """Seconds of own work by domain, and of the whole step."""
        self._work.append(work)
        self._steps.append(step)
        self._quiet -= 1

    def report(self) -> Straggler | None:
        """The slowest domain, if it is a straggler and was not reported lately."""
        if len(self._work) < _WINDOW or len(self._domains) < 2 or self._quiet > 0:
            return None
        typical = [statistics.median(of) for of in zip(*self._work, strict=True)]
        slowest = max(range(len(typical)), key=typical.__getitem__)
        others = statistics.median(t for i, t in enumerate(typical) if i != slowest)
        step = statistics.median(self._steps)
        if others <= 0 or step <= 0:
            return None
        ratio = typical[slowest] / others
        if ratio < _RATIO or (typical[slowest] - others) / step < _SHARE:
            return None
        self._quiet = _REMIND_STEPS
        return Straggler(self._domains[slowest], ratio, typical[slowest] / step)
