"""Starting processes such that they can all be ended again, whatever happens to the launcher.

Every process of a run carries a mark in its environment. Descendants are found by it even when
their parents are gone: torchrun puts each worker into a session of its own, so that neither
process groups nor a parent-death signal (which reaches torchrun only) would do. A small guard
process, which notices the launcher's death by the end of a pipe, ends what is left after a SIGKILL,
and removes the network of the run (network.py), if it has one.

``python -m torchtitan_ft.launch.processes MARK`` is that guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import psutil

from . import network

MARK = "TORCHTITAN_FT_RUN"
"""Environment variable with the run's mark; a domain's is ``<mark>/<domain>``."""

GRACE_SECONDS = 5.0
_KILL_SECONDS = 3.0
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt orphaned descendants instead of leaving them to init; does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that carry ``mark`` (or a mark below it), and all their descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            value = process.environ().get(MARK, "")
            if value == mark or value.startswith(f"{mark}/"):
                for one in (process, *process.children(recursive=True)):
                    found[one.pid] = one
    found.pop(os.getpid(), None)
    return [p for p in found.values() if _alive(p)]


def end(
    find: Callable[[], Iterable[psutil.Process]],
    grace: float = GRACE_SECONDS,
    *,
    hurry: Callable[[], bool] = lambda: False,
) -> bool:
    """End what ``find`` finds: SIGTERM, a bounded wait, SIGKILL.

    Args:
        find: the processes that should go; asked again and again, as they may start others.
        grace: seconds between SIGTERM and SIGKILL.
        hurry: whether not to wait any longer.

    Returns:
        Whether nothing is left.
    """
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + grace
    while left := [p for p in find() if _alive(p)]:
        now = time.monotonic()
        if now > deadline + _KILL_SECONDS:
            return False
        late = now >= deadline or hurry()
        for process in left:
            if late or process not in asked:
                asked.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                    process.send_signal(signal.SIGCONT)  # a stopped one would not notice
        time.sleep(0.05)
    return True


def resume(mark: str, rank: int) -> bool:
    """SIGCONT to what is stopped of rank ``rank`` of the domain with this mark.

    Returns:
        Whether anything was stopped.
    """
    found = False
    for process in marked(mark):
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get("LOCAL_RANK") == str(rank)
            if ours and process.status() == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)
                found = True
    return found


def start_guard(mark: str) -> subprocess.Popen[bytes]:
    """Start the process that ends and removes all with ``mark`` once this process is gone."""
    environment = {k: v for k, v in os.environ.items() if k != MARK}
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, mark],
        stdin=subprocess.PIPE,  # its write end exists in this process only
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # out of reach of Ctrl-C
    )


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _guard(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end(lambda: marked(mark))
    network.remove(mark)


if __name__ == "__main__":
    _guard(sys.argv[1])
