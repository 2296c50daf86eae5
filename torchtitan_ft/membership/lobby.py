"""Notices domains that ask to be admitted to a running generation."""

from __future__ import annotations

import threading
from collections.abc import Callable

_EVERY_SECONDS = 0.25


class Lobby(threading.Thread):
    """Looks from ``start`` to ``stop``; one process of a generation does.

    Args:
        look: names the domains that ask; raises OSError if it cannot tell.
    """

    def __init__(self, look: Callable[[], tuple[str, ...]]) -> None:
        super().__init__(name="lobby", daemon=True)
        self._look = look
        self._end = threading.Event()
        self.waiting: tuple[str, ...] = ()
        """Domains that wait to be admitted."""

    def stop(self) -> None:
        """Look no more. Does not wait for the thread: what it still finds is found again."""
        self._end.set()

    def run(self) -> None:
        while not self._end.wait(_EVERY_SECONDS):
            try:
                found = self._look()
            except OSError:
                continue  # the witness may be restarting; training goes on without it
            self.waiting += found
