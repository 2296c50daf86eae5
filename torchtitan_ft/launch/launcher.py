"""Runs all fault domains of a job on this machine: a lighthouse, and one torchrun per domain.

It also does the part of injected faults that a process cannot do to itself: starting it again,
waking it up, cutting its network off, killing the lighthouse. The workers' ``chaos`` events say when.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from ..events import read_events
from . import network, processes
from .chaos import LIGHTHOUSE_SECONDS, Fault, Schedule, draw, is_random, parse
from .lighthouse import Lighthouse, LighthouseError
from .live import EventTail, View, begins_report, is_torchrun, is_trouble

_STRAGGLER_SECONDS = 15.0
"""How long the other domains may take to leave once one has finished the run."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 2.0
"""How much later than its event a process may stop, and still be waked up."""
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
        if any(o.split("=")[0] == "--fault_tolerance.chaos" for o in self.overrides):
            raise LaunchError("give faults with --chaos: the launcher has its part in them")
        for fault in self.faults():
            if fault.domain not in self.names:
                raise LaunchError(
                    f"--chaos: there is no domain {fault.domain!r}, only "
                    f"0 to {self.domains - 1} ('{fault}')"
                )
            if fault.rank is not None and fault.rank >= self.nproc_per_domain:
                raise LaunchError(
                    f"--chaos: a domain has {self.nproc_per_domain} ranks, from 0 ('{fault}')"
                )

    def drawn(self, steps: int) -> Job:
        """With a ``random:`` schedule made explicit, for a run of so many steps."""
        if not is_random(self.chaos):
            return self
        try:
            return replace(self, chaos=draw(self.chaos, domains=self.names, steps=steps))
        except ValueError as error:
            raise LaunchError(f"--chaos: {error}") from error

    def faults(self) -> tuple[Fault, ...]:
        """Those injected; none of a ``random:`` schedule yet to be drawn."""
        try:
            # A draw for no steps finds what is wrong with the specification.
            return parse(self.drawn(0).chaos)
        except ValueError as error:
            raise LaunchError(f"--chaos: {error}") from error

    @property
    def names(self) -> list[str]:
        return [str(i) for i in range(self.domains)]

    def arguments(self, domain: str, *, chaos_left: str | None = None) -> list[str]:
        """Of the worker; in a later life of the domain, with the faults that are left."""
        spec = self.chaos if chaos_left is None else chaos_left
        # An empty one has to be said too: the file may have faults of its own.
        say = chaos_left is not None or (spec and not is_random(spec))
        return [
            *("--config", str(self.config)),
            *("--fault_tolerance.domain", domain),
            *("--fault_tolerance.domains", str(self.domains)),
            *(("--fault_tolerance.chaos", spec) if say else ()),
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
    """A fault domain in its present life."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    reader: threading.Thread
    started: float
    """As events count time."""
    log_start: int
    """Size of the log file before this life."""
    again: bool
    """Whether it had a life before."""
    status: int | None = None
    member: bool = False
    """Whether a generation has had it."""
    restart: dict[str, Any] | None = None
    """The fault after which it is started again, once it has ended."""
    waits: bool = False
    """Whether it has ended, and is about to be started again."""


@dataclass
class _Launch:
    """One run; see :func:`launch`."""

    job: Job
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    signals: list[int] = field(default_factory=list)
    domains: dict[str, _Domain] = field(default_factory=dict)
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    lighthouse: Lighthouse | None = None
    network: network.Network | None = None

    def run(self) -> int:
        processes.become_subreaper()
        with self._handled_signals():
            guard = processes.start_guard(self.mark)
            try:
                code = self._run()
            finally:
                clean = self._end(self.mark)
                if self.network is not None:
                    clean = self.network.close() and clean
                assert guard.stdin is not None
                guard.stdin.close()
                guard.wait()
        if not clean:
            print("torchtitan-ft: some processes could not be ended", file=sys.stderr)
            return code or 1
        return code

    def _run(self) -> int:
        self._check_surroundings()
        facts = self._describe()
        if facts is None:
            return 128 + self.signals[0]
        drawn = is_random(self.job.chaos)
        if drawn:
            if "steps" not in facts:
                raise LaunchError("--chaos: the steps of the run are not known: draw it by hand")
            self.job = self.job.drawn(facts["steps"])
            self._check_surroundings()
        self.schedule = Schedule(self.job.faults())
        self.folder = Path(facts["dump_folder"]) / "ft"
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot write to dump_folder: {error}") from error
        self._before = _identity(self._summary)
        self._connect(facts)
        self.events = EventTail(self.folder / "events.jsonl")
        self.view = View(self.job.names, live=self.job.live)
        try:
            steps = f", {facts['steps']} steps" if "steps" in facts else ""
            self.view.say(
                f"{self.job.domains} domains of {self.job.nproc_per_domain}{steps}; "
                f"logs in {self.folder / 'logs'}, lighthouse {self.address}"
            )
            if drawn:
                self.view.say(f"drawn: --chaos '{self.job.chaos}'")
            started = time.time()
            for name in self.job.names:
                if not self.signals:
                    self._start(name)
            self._watch()
            if self.signals:
                self.view.mute()
                self.view.say(f"{signal.Signals(self.signals[0]).name}: ending all domains")
            self._end(self.mark, spare_lighthouse=True)
            for domain in self.domains.values():
                domain.status = domain.process.wait()
                domain.reader.join(2.0)
            self._follow(act=False)
        finally:
            shown = self.view.close()
            if self.lighthouse is not None:
                self.lighthouse.close()
        if self.signals:
            code = 128 + self.signals[0]
        elif self._complete():
            code = 0
        else:
            code = 1
            print(self._report(started), file=sys.stderr)
        if not shown:
            # A thread that waits for the console for ever would keep the interpreter from ending.
            self._end(self.mark)
            if self.network is not None:
                self.network.close()
            os._exit(code)
        return code

    # Before the domains.

    def _check_surroundings(self) -> None:
        """Raises LaunchError if this machine does not let the faults happen."""
        actions = {fault.action for fault in self.job.faults()}
        for action in sorted(actions & {"partition", "kill_lighthouse"}):
            if os.environ.get("TORCHFT_LIGHTHOUSE"):
                raise LaunchError(
                    f"--chaos: {action} needs a lighthouse of the launcher's own; "
                    "unset TORCHFT_LIGHTHOUSE"
                )
        if "partition" in actions:
            try:
                network.check()
            except network.NetworkError as error:
                raise LaunchError(f"--chaos: partition cannot be injected: {error}") from error

    def _connect(self, facts: dict[str, Any]) -> None:
        """Make the network, if there is to be one, and start the lighthouse."""
        self.address = os.environ.get("TORCHFT_LIGHTHOUSE", "")
        if self.address:
            return
        try:
            if any(fault.action == "partition" for fault in self.job.faults()):
                self.network = network.Network(self.mark, self.job.names)
            self.lighthouse = Lighthouse(
                # On the loopback interface elsewise: its HTTP page lets anyone end a domain.
                "127.0.0.1" if self.network is None else self.network.address,
                heartbeat_timeout_ms=round(1000 * facts.get("failure_timeout_seconds", 2.0)),
                join_timeout_ms=round(1000 * facts.get("late_seconds", 8.0)),
                environment=self._environment("lighthouse"),
                log=self.folder / "logs" / "lighthouse.log",
            )
        except (network.NetworkError, LighthouseError) as error:
            raise LaunchError(str(error), code=1) from error
        self.address = self.lighthouse.address

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

    # Starting.

    def _start(self, name: str) -> None:
        again = name in self.domains
        inside, local, environment = [], [], self._environment(name)
        environment["TORCHFT_LIGHTHOUSE"] = self.address
        if self.network is not None:
            inside = self.network.command(name)
            # torchrun would ask for the host's name, which may lead outside.
            local = ["--local-addr", "127.0.0.1"]
            environment |= self.network.environment()
        # torchrun's own log folder would stay behind in /tmp, with the error of a generation that the
        # domain survived taken for the cause of its end.
        command = [
            *inside,
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(self.job.nproc_per_domain)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *local),
            *("--max-restarts", "0", "--log-dir", os.devnull, "-m", self.job.worker),
            *self.job.arguments(name, chaos_left=str(self.schedule) if again else None),
        ]
        log = self.folder / "logs" / f"domain-{name}.log"
        file = log.open("ab" if again else "wb", buffering=0)
        size, started = file.tell(), time.time()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(
            target=_drain,
            args=(process.stdout, file, self.view, name),
            name=f"log-{name}",
            daemon=True,
        )
        reader.start()
        self.domains[name] = _Domain(name, log, process, reader, started, size, again)

    def _start_again(self, domain: _Domain) -> None:
        if not domain.waits:  # the run is complete by now
            return
        domain.reader.join(2.0)
        self.view.started(domain.name)
        self.view.say(f"domain {domain.name} is started again")
        self._start(domain.name)

    # Watching.

    def _watch(self) -> None:
        """Until every domain has ended, or a signal came, or the run is complete but for those
        who do not leave."""
        deadline: float | None = None
        while not self.signals and (deadline is None or time.monotonic() < deadline):
            self._reap()
            if deadline is None and self._complete():
                deadline = time.monotonic() + _STRAGGLER_SECONDS
                self._dismiss()
            if all(d.status is not None and not d.waits for d in self.domains.values()):
                return
            if self.lighthouse is not None and (message := self.lighthouse.tend()) is not None:
                self.view.say(message)
            self._run_timers()
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> None:
        """See who has ended, and what has happened."""
        ended = []
        for domain in self.domains.values():
            if domain.status is None and (status := domain.process.poll()) is not None:
                domain.status = status
                ended.append(domain)
        # Whatever those who have ended wrote is there by now, and comes before their end.
        self._follow()
        for domain in ended:
            assert domain.status is not None
            self.view.exited(domain.name, domain.status)
            # The ranks of a domain fail together, also when it was torchrun that died.
            if domain.status:
                self._end(f"{self.mark}/{domain.name}", grace=0.0)
            if domain.restart is not None and not self._complete():
                seconds = float(domain.restart["seconds"])
                self.schedule.restarted(domain.restart)
                domain.waits = True
                self.view.say(f"domain {domain.name} is to be started again in {seconds:g} s")
                self._at(time.monotonic() + seconds, functools.partial(self._start_again, domain))

    def _dismiss(self) -> None:
        """The run is complete: whoever was started again, and came too late, has nothing to do."""
        for domain in self.domains.values():
            domain.waits = False
            if domain.again and not domain.member and domain.status is None:
                self._end(f"{self.mark}/{domain.name}", grace=0.0)

    def _at(self, due: float, action: Callable[[], None]) -> None:
        self.timers.append((due, action))

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self.timers if timer[0] <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for _, action in due:
            action()

    # Faults.

    def _follow(self, *, act: bool = True) -> None:
        """Take in what the workers have written into the event file."""
        for event in self.events.poll():
            self.view.event(event)
            if event["event"] == "generation_formed":
                for name in event["domains"]:
                    if name in self.domains:
                        self.domains[name].member = True
            elif event["event"] == "chaos" and event["domain"] in self.domains and act:
                self._carry_out(event)

    def _carry_out(self, event: dict[str, Any]) -> None:
        """Do the launcher's part of a fault, or see to it that it is done in time."""
        first = self.schedule.happened(event)
        name, rank, seconds = event["domain"], event["rank"], event.get("seconds")
        since = max(0.0, time.time() - event["time"])
        due = time.monotonic() + (seconds or 0.0) - since
        match event["action"]:
            case "restart" if first:
                self.domains[name].restart = event
            case "stop":  # every rank stops itself
                self._at(due, lambda: self._resume(name, rank, due + _STOP_SECONDS))
            case "partition" if first and self.network is not None:
                self._on_network(self.network.cut, name)
                self._at(due, lambda: self._heal(name))
            case "partition" if first:
                self.view.say("there is no network to cut: give a partition with --chaos")
            case "kill_lighthouse" if first and self.lighthouse is not None:
                seconds = LIGHTHOUSE_SECONDS if seconds is None else float(seconds)
                self.lighthouse.kill(seconds)
                self.view.say(f"the lighthouse is killed, for {seconds:g} s")

    def _resume(self, name: str, rank: int, until: float) -> None:
        if processes.resume(f"{self.mark}/{name}", rank):
            self.view.say(f"rank {rank} of domain {name} is continued")
        elif time.monotonic() < until:  # it may be about to stop itself
            self._at(time.monotonic(), lambda: self._resume(name, rank, until))

    def _heal(self, name: str) -> None:
        assert self.network is not None
        self._on_network(self.network.heal, name)
        self.view.say(f"domain {name} is connected again")

    def _on_network(self, change: Callable[[str], None], name: str) -> None:
        try:
            change(name)
        except network.NetworkError as error:
            self.view.say(f"the network of domain {name} cannot be changed: {error}")

    # Ending.

    def _end(
        self, mark: str, grace: float = processes.GRACE_SECONDS, *, spare_lighthouse: bool = False
    ) -> bool:
        spared = self.lighthouse.pid if spare_lighthouse and self.lighthouse is not None else None

        def left() -> Iterator[psutil.Process]:
            for domain in self.domains.values():
                domain.process.poll()  # no zombie of ours is taken for a live process
            for process in processes.marked(mark):
                if process.pid != spared:
                    yield process

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

    @property
    def _summary(self) -> Path:
        return self.folder / "summary.json"

    def _complete(self) -> bool:
        ended_well = any(d.status == 0 for d in self.domains.values())
        return ended_well and _identity(self._summary) not in (None, self._before)

    def _report(self, started: float) -> str:
        """What happened, for a person."""
        events = [e for e in read_events(self.folder / "events.jsonl") if e["time"] >= started]
        last = max((e["step"] for e in events if e["event"] == "step_committed"), default=None)
        reached = "no step was committed" if last is None else f"the last committed step is {last}"
        lines = [f"torchtitan-ft: the run did not complete; {reached}"]
        for domain in self.domains.values():
            now = [e for e in events if e["time"] >= domain.started]
            lost = {d for e in now if e["event"] == "peer_lost" for d in e["domains"]}
            lost |= {e["domain"] for e in now if e["event"] == "chaos"}
            text = domain.log.read_bytes()[domain.log_start :].decode(errors="replace")
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
