"""What the launcher shows: a table on a terminal, occasional lines elsewhere.

The workers never wait for the console: their output goes into a bounded buffer, and lines are
dropped from the view (not from the log files) when the console does not keep up.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..events import parse_line

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TROUBLE = re.compile(
    r" - (WARNING|ERROR|CRITICAL) - "
    r"|^(\[rank\d+\]:)?\s*[\w.]*(Error|Exception|Failure)\b.*:"
    r"|^torchtitan-ft: "
)
_TORCHRUN = re.compile(r"^[IWEF]\d{4} .*torch/distributed/(elastic|run|launcher)")
_TORCHRUN_REPORT = re.compile(r"^E\d{4} .*torch/distributed/elastic")
_CHAOS_STATES = {
    "stop": "stopped",
    "hang": "hung",
    "term": "leaving",
    "partition": "cut off",
}
"""Until the domain is heard of again, or missed."""
_BUFFERED_LINES = 5000
_LINE_LENGTH = 2000


def is_trouble(line: str) -> bool:
    """Whether a line of a worker is a warning or an error (of its own, not torchrun's report)."""
    return bool(_TROUBLE.search(line)) and not is_torchrun(line)


def is_torchrun(line: str) -> bool:
    """Whether torchrun itself says this."""
    return bool(_TORCHRUN.match(line)) or "torch.distributed.elastic" in line


def begins_report(line: str) -> bool:
    """Whether this is where torchrun reports a failed worker, at length, as the last it does."""
    return bool(_TORCHRUN_REPORT.match(line))


class EventTail:
    """Follows an event file from now on: through its creation, growth and rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._position = self._stat()
        self._rest = b""

    def _stat(self) -> tuple[int | None, int]:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None, 0
        return status.st_ino, status.st_size

    def poll(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        inode, size = self._stat()
        if inode != self._inode or size < self._position:
            self._inode, self._position, self._rest = inode, 0, b""
        if size == self._position:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := parse_line(line)) is not None]


@dataclass
class DomainView:
    """One line of the table."""

    state: str = "starting"
    step: int | None = None
    loss: float | None = None
    generation: int | None = None
    seconds: float | None = None

    @property
    def gone(self) -> bool:
        return self.state in ("lost", "finished", "failed", "left", "unused")


class RunView:
    """What is known about each domain, from events and from the processes' ends."""

    def __init__(self, domains: Sequence[str]) -> None:
        self.domains = {name: DomainView() for name in domains}
        self._members: list[str] = []
        self._finished = False

    def shown(self) -> str | None:
        """The domain whose output is shown: the first live one."""
        return next((name for name, view in self.domains.items() if not view.gone), None)

    def apply(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "generation_formed":
            self._members = event["domains"]
            for domain, view in self.domains.items():
                if domain in event["domains"]:
                    view.state, view.generation = "training", event["generation"]
        elif name == "step_committed":
            for view in self.domains.values():
                # A domain may commit alone what others have yet to hear of: the table is a sketch.
                if not view.gone and view.generation is not None:
                    view.state, view.step = "training", event["step"]
                    view.loss, view.seconds = event.get("loss"), event.get("seconds")
                    view.generation = event["generation"]
        elif name == "chaos":
            self._chaos(event["domain"], event.get("action"))
        elif name == "peer_lost":
            self._lost(event["domains"])
        elif name == "domain_left":
            for domain in event["domains"]:
                if domain in self.domains:
                    self.domains[domain].state = "left"
        elif name == "finished":
            self._finished = True
            for domain, view in self.domains.items():
                # Who ended well before this line was read was taken for one that left.
                if not view.gone or (view.state == "left" and domain in self._members):
                    view.state = "finished"

    def started(self, domain: str) -> None:
        """The domain's torchrun has been started again."""
        self.domains[domain] = DomainView()

    def exited(self, domain: str, status: int) -> None:
        """The domain's torchrun has ended."""
        view = self.domains[domain]
        if status == 0:
            view.state = "finished" if self._finished and domain in self._members else "left"
        elif self._finished and view.generation is None:
            view.state = "unused"
        elif view.state != "lost":
            if view.generation is None:
                view.state = "failed"
            else:
                self._lost([domain])

    def _chaos(self, domain: str, action: str | None) -> None:
        view = self.domains.get(domain)
        if view is None or view.gone:
            return
        if action in ("kill", "restart"):
            self._lost([domain])
        elif action in _CHAOS_STATES:
            view.state = _CHAOS_STATES[action]

    def _lost(self, domains: Sequence[str]) -> None:
        for domain, view in self.domains.items():
            if domain in domains:
                view.state = "lost"
            elif view.state == "training":
                view.state = "recovering"

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("domain")
        table.add_column("state", min_width=len("recovering"))
        for column in ("step", "loss", "generation", "step time"):
            table.add_column(column, justify="right")
        styles = {"training": "green", "recovering": "yellow", "lost": "red", "failed": "red"}
        for domain, view in self.domains.items():
            table.add_row(
                domain,
                Text(view.state, styles.get(view.state, "")),
                _text(view.step),
                "" if view.loss is None else f"{float(view.loss):.4f}",
                _text(view.generation),
                "" if view.seconds is None else f"{float(view.seconds):.2f} s",
            )
        return table


def describe_event(event: dict[str, Any]) -> str | None:
    """An event of interest as a line for people; None for the others."""
    name = event["event"]
    if name == "generation_formed":
        copies = event["copies"]
        return (
            f"generation {event['generation']} formed after step {event['step']}: domains "
            f"{', '.join(event['domains'])}; {copies} {'copy' if copies == 1 else 'copies'}"
        )
    if name == "chaos":
        text = (
            f"chaos: {event['action']} domain {event['domain']} rank {event['rank']} "
            f"in {event['phase']} of step {event['step']}"
        )
        if event.get("factor") is not None:
            text += f", {float(event['factor']):g} times slower"
        return text
    if name == "peer_lost":
        lost = ", ".join(event["domains"]) or "no domain"
        return f"lost in {event['phase']} of step {event['step']}: {lost}"
    if name == "domain_left":
        return f"left after step {event['step']}: {', '.join(event['domains'])}"
    if name == "recovered":
        return (
            f"recovered in {float(event['seconds_total']):.2f} s ({event['action']} "
            f"after step {event['step']}, {event['steps_lost']} steps lost)"
        )
    if name == "state_lost":
        return f"state lost: {event.get('message', ', '.join(event.get('domains', [])))}"
    if name == "finished":
        return f"finished at step {event['step']}"
    return None


class View:
    """Shows a run from a thread of its own.

    Args:
        domains: their names, in order.
        live: draw a table if the output is a terminal.
        file: where to; standard output by default.
    """

    def __init__(self, domains: Sequence[str], *, live: bool, file: TextIO | None = None) -> None:
        self._file = sys.stdout if file is None else file
        self._run = RunView(domains)
        self._console = Console(file=self._file, highlight=False)
        self._live = live and self._console.is_terminal
        self._facts: deque[Callable[[], None]] = deque(maxlen=_BUFFERED_LINES)
        self._items: deque[Callable[[], None]] = deque()
        self._dropped = 0
        self._muted = False
        self._reporting: set[str] = set()
        self._warnings: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="view", daemon=True)
        self._thread.start()

    # From any thread; none of these waits.

    def event(self, event: dict[str, Any]) -> None:
        """What a worker wrote into the event file."""
        self._facts.append(lambda: self._show_event(event))

    def say(self, message: str) -> None:
        self._facts.append(lambda: self._print(Text(f"[launch] {message}", "bold")))

    def started(self, domain: str) -> None:
        """The domain has been started again."""
        self._facts.append(lambda: self._started(domain))

    def exited(self, domain: str, status: int) -> None:
        self._facts.append(lambda: self._run.exited(domain, status))

    def mute(self) -> None:
        """Show no more of the domains' output: they are being ended, and say so at length."""
        self._muted = True

    def line(self, domain: str, line: str) -> None:
        """A line of a domain's output."""
        if self._muted:
            return
        if len(self._items) >= _BUFFERED_LINES:
            self._dropped += 1
        else:
            self._items.append(lambda: self._show_line(domain, line[:_LINE_LENGTH]))

    def close(self, timeout: float = 2.0) -> bool:
        """Show what is left; False if the console took no more of it in time."""
        self._closing.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # In the thread.

    def _main(self) -> None:
        try:
            with ExitStack() as stack:
                screen: Live | None = None
                if self._live:
                    screen = stack.enter_context(
                        Live(
                            self._run.table(),
                            console=self._console,
                            auto_refresh=False,
                            redirect_stdout=False,
                            redirect_stderr=False,
                        )
                    )
                closing = False
                while not closing:
                    closing = self._closing.wait(0.1)
                    self._work()
                    if screen is not None:
                        screen.update(self._run.table(), refresh=True)
        except OSError:
            # Nobody looks any more (`| head`); the log files have it all. What Python still has to
            # flush at its exit must not fail again, and change the exit status.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    def _work(self) -> None:
        # Facts last: a line that announces a death should not be hidden by it.
        for queue in (self._items, self._facts):
            for _ in range(len(queue)):
                queue.popleft()()
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self._print(Text(f"[launch] {count} lines not shown; the log files have them", "dim"))

    def _show_event(self, event: dict[str, Any]) -> None:
        self._run.apply(event)
        if (message := describe_event(event)) is not None:
            self._print(Text(f"[launch] {message}", "bold"))

    def _started(self, domain: str) -> None:
        self._reporting.discard(domain)
        self._run.started(domain)

    def _show_line(self, domain: str, line: str) -> None:
        plain = _ANSI.sub("", line)
        _, warns, warning = plain.partition(" - WARNING - ")
        known = bool(warns) and warning in self._warnings
        if warns and len(self._warnings) < _BUFFERED_LINES:
            self._warnings.add(warning)
        if begins_report(plain):
            self._reporting.add(domain)
        if domain in self._reporting:
            return  # the launcher says it in a line
        if domain == self._run.shown():
            if not is_torchrun(plain):
                self._print(Text(f"[{domain}] ") + Text.from_ansi(line))
        elif is_trouble(plain) and not known:  # every domain gives most warnings
            self._print(Text(f"[{domain}] {plain}"))

    def _print(self, text: Text) -> None:
        if self._console.is_terminal:
            self._console.print(text)
        else:  # as it is: rich would wrap it
            self._file.write(text.plain + "\n")
            self._file.flush()


def _text(value: object) -> str:
    return "" if value is None else str(value)
