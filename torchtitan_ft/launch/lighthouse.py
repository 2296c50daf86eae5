"""The lighthouse of a launcher: a process of its own, which can die and be started again.

``python -m torchtitan_ft.launch.lighthouse --bind HOST:PORT --heartbeat-timeout-ms N
--join-timeout-ms N`` is that process. It prints its address, and ends when its standard input does.
It starts without the seconds that importing torch takes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_PORTS = range(20_000, 32_768)
"""Below the ports that Linux gives to clients. One of those, calling a lighthouse that is away, might
be given the very port it calls, and keep it."""
_START_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_MOST_FAILURES = 5


class LighthouseError(RuntimeError):
    """There can be no lighthouse; the message says why."""


def _extension() -> ModuleType:
    """torchft's Rust part alone: ``import torchft.coordination`` imports all of torch (3 s)."""
    if "torchft" in sys.modules:
        from torchft import _torchft

        return _torchft
    package = importlib.util.find_spec("torchft")
    if package is None or package.submodule_search_locations is None:
        raise ImportError("torchft is not installed")
    spec = importlib.machinery.PathFinder.find_spec(
        "_torchft", list(package.submodule_search_locations)
    )
    if spec is None or spec.loader is None:
        raise ImportError("torchft has no extension module _torchft")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lighthouse:
    """A lighthouse process at a fixed address.

    Args:
        host: where it listens. Its HTTP page lets anyone end a domain: no public address.
        heartbeat_timeout_ms: a domain silent for this long is dead.
        join_timeout_ms: how long to wait for a live but late domain.
        environment: of the process.
        log: file that its messages are appended to.

    Raises:
        LighthouseError: if it does not start.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        heartbeat_timeout_ms: int,
        join_timeout_ms: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._bind = f"{host}:{_free_port(host)}"
        self._options = ["--heartbeat-timeout-ms", str(heartbeat_timeout_ms)]
        self._options += ["--join-timeout-ms", str(join_timeout_ms)]
        self._environment = dict(environment)
        self._log = log
        self._again: float | None = None
        """When to start it again; None while it should be there."""
        self._failures = 0
        self._process = self._start()
        try:
            self.address = self._first_line()
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--bind", self._bind, *self._options],
                env=self._environment,
                stdin=subprocess.PIPE,  # its write end exists in this process only
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _first_line(self) -> str:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], _START_SECONDS)
        line = out.readline().decode().strip() if ready else ""
        if not line:
            raise LighthouseError(f"the lighthouse does not start at {self._bind}; see {self._log}")
        return line

    @property
    def pid(self) -> int:
        """Of the process that is, or was the last, at the address."""
        return self._process.pid

    def kill(self, seconds: float) -> None:
        """SIGKILL it; :meth:`tend` starts it again ``seconds`` later."""
        self._process.kill()
        self._process.wait()
        self._again = max(self._again or 0.0, time.monotonic() + seconds)

    def tend(self) -> str | None:
        """See that it is there, unless it was killed a moment ago; to be called again and again.

        Returns:
            What happened, if anything did.
        """
        status = self._process.poll()
        if status is None:
            return None
        now = time.monotonic()
        if self._again is None:
            quick = now - self._started < _START_SECONDS
            self._failures = self._failures + 1 if quick else 1
            how = f"the lighthouse has ended (status {status}"
            if self._failures >= _MOST_FAILURES:
                self._again = float("inf")
                return f"{how}, again); it is not started any more; see {self._log}"
            self._again = now + (_AGAIN_SECONDS if self._failures > 1 else 0.0)
            return f"{how}); it is started again"
        if now < self._again:
            return None
        self._close_pipes()
        self._process = self._start()
        self._again = None
        return f"the lighthouse is started again at {self.address}"

    def close(self) -> None:
        """End it, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _free_port(host: str) -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise LighthouseError(f"no free port at {host} between {_PORTS.start} and {_PORTS.stop}")


def main(argv: Sequence[str] | None = None) -> None:
    """Be the lighthouse until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_ft.launch.lighthouse")
    parser.add_argument("--bind", metavar="HOST:PORT", required=True)
    parser.add_argument("--heartbeat-timeout-ms", type=int, metavar="N", required=True)
    parser.add_argument("--join-timeout-ms", type=int, metavar="N", required=True)
    options = parser.parse_args(argv)
    os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every quorum at info
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server: Any = _extension().LighthouseServer(
        bind=options.bind,
        min_replicas=1,
        join_timeout_ms=options.join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
    )
    # It reports the host's name, which need not lead to the interface it listens on.
    print(f"http://{options.bind.rpartition(':')[0]}:{server.address().rpartition(':')[2]}")
    sys.stdout.flush()
    while os.read(0, 1):
        pass
    os._exit(0)  # its shutdown would wait for those who ask it something


if __name__ == "__main__":
    main()
