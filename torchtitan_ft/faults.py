"""Faults that a process does to itself, at the point that the chaos specification names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from .events import EventLog
from .launch.chaos import Fault
from .membership import World

_BETWEEN_STEPS = ("build", "recovery", "join")
"""Phases that belong to no step: the first at or after the fault's step is meant."""


class Injector:
    """Injects the faults of one process, each once.

    What concerns others than the process itself (``partition``, ``kill_lighthouse``, the end of a
    ``stop``, starting again) is the launcher's part: it reads the ``chaos`` event written here.

    Args:
        faults: of this process.
        events: where each is written down before it happens.
    """

    def __init__(self, faults: Sequence[Fault], events: EventLog) -> None:
        self._faults = list(faults)
        self._events = events
        self._factor = 1.0

    def at(self, phase: str, step: int, world: World, before: Callable[[], object]) -> None:
        """The process is at ``phase`` of ``step``; ``before`` runs before a fault that is due."""
        if phase in _BETWEEN_STEPS and world.generation == 1:
            return
        for fault in [f for f in self._faults if f.phase == phase]:
            due = fault.step <= step + 1 if phase in _BETWEEN_STEPS else fault.step == step
            if not due:
                continue
            self._faults.remove(fault)
            self._events.write(
                "chaos",
                generation=world.generation,
                step=step,
                action=fault.action,
                phase=phase,
                seconds=fault.seconds,
                factor=fault.factor,
            )
            before()
            self._inject(fault)

    def slow_down(self, seconds: float) -> float:
        """Sleep as long as work of ``seconds`` takes longer on a slow machine; returns how long."""
        extra = seconds * (self._factor - 1.0)
        if extra > 0:
            time.sleep(extra)
        return extra

    def _inject(self, fault: Fault) -> None:
        match fault.action:
            case "kill" | "restart":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                assert fault.seconds is not None
                time.sleep(fault.seconds)
            case "slow":
                assert fault.factor is not None
                self._factor = fault.factor
