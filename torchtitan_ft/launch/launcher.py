"""Runs all fault domains of a job on this machine: a lighthouse, and one torchrun per domain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from ..events import read_events
from . import chaos, processes
from .lighthouse import Lighthouse
from .live import View, begins_report, is_torchrun, is_trouble

_STRAGGLER_SECONDS = 15.0
"""How long the other domains may take to leave once one has finished the run."""
_POLL_SECONDS = 0.05
_TAIL_LINES = 5
_LONGEST_PIECE = 1 << 16
_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)


class LaunchError(RuntimeError):
    """The job cannot start; the message says why, the code is the exit status."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run."""

    config: Path
    domains: int = 1
    nproc_per_domain: int = 1
    chaos: str = ""
    live: bool = True
    overrides: tuple[str, ...] = ()
    """Arguments of the worker that override the file."""
    worker: str = "torchtitan_ft.worker"
    """The module that torchrun runs."""

    def check(self) -> None:
        """Raises :class:`LaunchError` for what can be known without starting anything."""
        if not self.config.is_file():
            raise LaunchError(f"no configuration file {self.config}")
        for name in ("domains", "nproc_per_domain"):
            if getattr(self, name) < 1:
                raise LaunchError(f"--{name.replace('_', '-')} must be at least 1")
        try:
            faults = chaos.parse(self.chaos)
        except ValueError as error:
            raise LaunchError(f"--chaos: {error}") from error
        for fault in faults:
            if fault.domain not in self.names:
                raise LaunchError(
                    f"--chaos: there is no domain {fault.domain!r}, only "
                    f"0 to {self.domains - 1} ('{fault}')"
                )
            if fault.rank is not None and fault.rank >= self.nproc_per_domain:
                raise LaunchError(
                    f"--chaos: a domain has {self.nproc_per_domain} ranks, from 0 ('{fault}')"
                )

    @property
    def names(self) -> list[str]:
        return [str(i) for i in range(self.domains)]

    def arguments(self, domain: str) -> list[str]:
        """Of the worker."""
        faults = ["--fault_tolerance.chaos", self.chaos] if self.chaos else []
        return [
            *("--config", str(self.config)),
            *("--fault_tolerance.domain", domain),
            *("--fault_tolerance.domains", str(self.domains)),
            *faults,
            *self.overrides,
        ]


def launch(job: Job) -> int:
    """Run ``job`` to its end. Call it in the main thread: it handles SIGINT and SIGTERM.

    Returns:
        The exit status: 0 if the steps were completed, whoever died meanwhile; 2 for a job that
        cannot start; 128 + n when signal n ended it; otherwise 1.
    """
    try:
        job.check()
        return _Launch(job).run()
    except LaunchError as error:
        print(f"torchtitan-ft: {error}", file=sys.stderr)
        return error.code


@dataclass
class _Domain:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    reader: threading.Thread
    status: int | None = None


@dataclass
class _Launch:
    """One run; see :func:`launch`."""

    job: Job
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    signals: list[int] = field(default_factory=list)
    domains: list[_Domain] = field(default_factory=list)

    def run(self) -> int:
        processes.become_subreaper()
        with self._handled_signals():
            guard = processes.start_guard(self.mark)
            try:
                code = self._run()
            finally:
                clean = self._end(self.mark)
                assert guard.stdin is not None
                guard.stdin.close()
                guard.wait()
        if not clean:
            print("torchtitan-ft: some processes could not be ended", file=sys.stderr)
            return code or 1
        return code

    def _run(self) -> int:
        facts = self._describe()
        if facts is None:
            return 128 + self.signals[0]
        folder = Path(facts["dump_folder"]) / "ft"
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot write to dump_folder: {error}") from error
        before = _identity(folder / "summary.json")

        address = os.environ.get("TORCHFT_LIGHTHOUSE")
        lighthouse: Lighthouse | None = None
        if not address:
            lighthouse = Lighthouse(
                heartbeat_timeout_ms=facts.get("heartbeat_timeout_ms", 500),
                join_timeout_ms=facts.get("join_timeout_ms", 5000),
            )
            address = lighthouse.address
        view = View(self.job.names, live=self.job.live)
        try:
            view.follow(folder / "events.jsonl")
            steps = f", {facts['steps']} steps" if "steps" in facts else ""
            view.say(
                f"{self.job.domains} domains of {self.job.nproc_per_domain}{steps}; "
                f"logs in {folder / 'logs'}, lighthouse {address}"
            )
            started = time.time()
            for name in self.job.names:
                if not self.signals:
                    self._start(name, address, folder / "logs" / f"domain-{name}.log", view)
            self._watch(view, folder / "summary.json", before)
            if self.signals:
                view.mute()
                view.say(f"{signal.Signals(self.signals[0]).name}: ending all domains")
            self._end(self.mark)
            for domain in self.domains:
                domain.status = domain.process.wait()
                domain.reader.join(2.0)
        finally:
            shown = view.close()
            if lighthouse is not None:
                lighthouse.close()
        if self.signals:
            code = 128 + self.signals[0]
        elif self._complete(folder / "summary.json", before):
            code = 0
        else:
            code = 1
            print(self._report(folder, started), file=sys.stderr)
        if not shown:
            # A thread that waits for the console for ever would keep the interpreter from ending.
            self._end(self.mark)
            os._exit(code)
        return code

    # Starting.

    def _environment(self, domain: str) -> dict[str, str]:
        environment = {**os.environ, processes.MARK: f"{self.mark}/{domain}"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return environment

    def _describe(self) -> dict[str, Any] | None:
        """What the worker makes of the configuration; None when a signal came first.

        Raises:
            LaunchError: with the worker's own message when it refuses.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", self.job.worker, "--describe", *self.job.arguments("0")],
            env=self._environment("0"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        while True:
            try:
                out, errors = process.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if self.signals:
                    self._end(self.mark)
                    process.communicate()
                    return None
        if self.signals:
            return None
        lines = errors.strip().splitlines()
        if process.returncode == 2:
            # Its one clear error is the last line; what precedes it are warnings of imports.
            ours = [i for i, line in enumerate(lines) if line.startswith("torchtitan-ft: ")]
            text = "\n".join(lines[ours[-1] :] if ours else lines)
            raise LaunchError(text.removeprefix("torchtitan-ft: "))
        try:
            if process.returncode == 0:
                facts = json.loads(out.strip().splitlines()[-1])
                if isinstance(facts, dict) and "dump_folder" in facts:
                    return facts
        except (ValueError, IndexError):
            pass
        tail = "\n".join(lines[-20:])
        raise LaunchError(
            f"{self.job.worker} --describe failed ({_outcome(process.returncode)})\n{tail}", code=1
        )

    def _start(self, name: str, lighthouse: str, log: Path, view: View) -> None:
        # torchrun's own log folder would stay behind in /tmp, with the error of a generation that the
        # domain survived taken for the cause of its end.
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(self.job.nproc_per_domain)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--max-restarts", "0", "--log-dir", os.devnull),
            *("-m", self.job.worker, *self.job.arguments(name)),
        ]
        file = log.open("wb", buffering=0)
        process = subprocess.Popen(
            command,
            env={**self._environment(name), "TORCHFT_LIGHTHOUSE": lighthouse},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(
            target=_drain, args=(process.stdout, file, view, name), name=f"log-{name}", daemon=True
        )
        reader.start()
        self.domains.append(_Domain(name, process, log, reader))

    # Watching and ending.

    def _watch(self, view: View, summary: Path, before: object) -> None:
        """Until every domain has ended, or a signal came, or the run is complete but for those
        who do not leave."""
        deadline: float | None = None
        while not self.signals and (deadline is None or time.monotonic() < deadline):
            for domain in self.domains:
                if domain.status is None and (status := domain.process.poll()) is not None:
                    domain.status = status
                    view.exited(domain.name, status)
                    # The ranks of a domain fail together, also when it was torchrun that died.
                    if status:
                        self._end(f"{self.mark}/{domain.name}", grace=0.0)
            if all(d.status is not None for d in self.domains):
                return
            if deadline is None and self._complete(summary, before):
                deadline = time.monotonic() + _STRAGGLER_SECONDS
            time.sleep(_POLL_SECONDS)

    def _end(self, mark: str, grace: float = processes.GRACE_SECONDS) -> bool:
        def left() -> Iterator[psutil.Process]:
            for domain in self.domains:
                domain.process.poll()  # no zombie of ours is taken for a live process
            yield from processes.marked(mark)

        return processes.end(left, grace, hurry=lambda: len(self.signals) > 1)

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        # Only noted here: the loops look. A second one stops waiting for those who do not go.
        old = {n: signal.signal(n, lambda n, _: self.signals.append(n)) for n in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    # The end.

    def _complete(self, summary: Path, before: object) -> bool:
        return any(d.status == 0 for d in self.domains) and _identity(summary) not in (None, before)

    def _report(self, folder: Path, started: float) -> str:
        """What happened, for a person."""
        events = [e for e in read_events(folder / "events.jsonl") if e["time"] >= started]
        lost = {d for e in events if e["event"] == "peer_lost" for d in e["domains"]}
        lost |= {e["domain"] for e in events if e["event"] == "chaos"}
        last = max((e["step"] for e in events if e["event"] == "step_committed"), default=None)
        reached = "no step was committed" if last is None else f"the last committed step is {last}"
        lines = [f"torchtitan-ft: the run did not complete; {reached}"]
        for domain in self.domains:
            text = domain.log.read_text(errors="replace")
            codes = [int(code) for code in _EXIT_CODE.findall(text)] if domain.status else []
            status = next((c for c in codes if c), domain.status or 0)
            lines.append(f"  domain {domain.name}: {_outcome(status)} ({domain.log})")
            if domain.status and domain.name not in lost:
                lines += [f"    {line}" for line in last_errors(text)]
        return "\n".join(lines)


def last_errors(log: str) -> list[str]:
    """The last lines of a worker's output that say what went wrong, without torchrun's report."""
    lines: list[str] = []
    for line in log.splitlines():
        if begins_report(line):
            break
        if line.strip() and not is_torchrun(line):
            lines.append(line)
    trouble = [line for line in lines if is_trouble(line)]
    errors = [line for line in trouble if " - WARNING - " not in line]
    return (errors or trouble or lines)[-_TAIL_LINES:]


def _drain(pipe: IO[bytes], log: IO[bytes], view: View, domain: str) -> None:
    """Move a domain's output into its log file and the view, never letting the domain wait."""
    rest = b""
    with pipe, log:
        while data := os.read(pipe.fileno(), _LONGEST_PIECE):
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                log.write(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_PIECE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                view.line(domain, line.decode(errors="replace").rstrip("\r"))
    if rest:
        view.line(domain, rest.decode(errors="replace"))


def _identity(path: Path) -> tuple[int, int] | None:
    """Changes when the file is written anew."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _outcome(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
