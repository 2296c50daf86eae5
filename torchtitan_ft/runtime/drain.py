"""SIGTERM as a request to leave: the step is finished first."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

_SAME_SIGNAL_SECONDS = 1.0
"""A scheduler signals a whole process group, and torchrun, being in it, passes it on: that is one."""


class Drain:
    """Whether this process has been asked to leave. Construct it in the main thread.

    The handler's work is done in a thread, which runs even if the main thread waits in a collective.

    Args:
        seconds: after the first SIGTERM the process has this long; then, or at a second SIGTERM, it
            ends at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked = 0.0
        self._busy = False
        self._read, write = socket.socketpair()
        write.setblocking(False)
        self._write = write  # kept open
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        # Without a handler in Python the signal would still end the process.
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._serve, name="drain", daemon=True).start()

    @property
    def asked(self) -> bool:
        """Whether to leave at the next step boundary."""
        return bool(self._asked)

    def busy(self, state: bool) -> None:
        """Say whether there is state to hand over: without any, SIGTERM ends the process at once."""
        self._busy = state

    def _serve(self) -> None:
        while data := self._read.recv(64):
            if signal.SIGTERM not in data:
                continue
            now = time.monotonic()
            if not self._asked and self._busy:
                self._asked = now
                timer = threading.Timer(self._seconds, _end)
                timer.daemon = True
                timer.start()
            elif now - self._asked > _SAME_SIGNAL_SECONDS:
                _end()


def _end() -> None:
    # The main thread is not asked: it may be stuck.
    os._exit(128 + signal.SIGTERM)
