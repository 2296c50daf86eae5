"""What a run did, from its events: steps, samples, failures, redundancy, throughput.

``python -m torchtitan_ft.summary DUMP_FOLDER`` prints it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .events import read_events

_ALWAYS_SET = ("time", "domain", "rank", "event")


@dataclass(kw_only=True, slots=True)
class Summary:
    """``<dump_folder>/ft/summary.json``."""

    finished: bool = False
    """Whether the run says that it committed all its steps."""
    steps: int = 0
    """Different steps committed."""
    last_step: int = 0
    steps_lost: int = 0
    """Committed steps that a recovery had to give up."""
    samples_lost: int = 0
    """Samples of the steps up to the last one that no committed step has."""
    samples_repeated: int = 0
    """Samples that committed steps have beyond what they should: twice, or from elsewhere."""
    generations: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The ``recovered`` events, with the domains, phase and (broken) step of the ``peer_lost``
    before them."""
    state_lost: list[dict[str, Any]] = field(default_factory=list)
    """The ``state_lost`` events."""
    bytes_state: dict[str, int] = field(default_factory=dict)
    """Own state of each domain of the last generation."""
    bytes_redundant: dict[str, int] = field(default_factory=dict)
    """What each domain of the last generation holds for others."""
    seconds: float = 0.0
    """From the first generation to the end."""
    tokens_per_second: float = 0.0


def summarize(
    events: Sequence[dict[str, Any]],
    *,
    expected_samples: Callable[[int], Iterable[int]] | int | None = None,
) -> Summary:
    """Account for a run.

    Args:
        events: of one run, in the order written.
        expected_samples: the samples of step t (from 1), or the size of the global batch when step
            t has samples ``(t - 1) * size`` to ``t * size - 1``. None takes that size from the
            first ``generation_formed`` event.
    """
    formed = [e for e in events if e["event"] == "generation_formed"]
    committed = _standing(events)
    finished = [e for e in events if e["event"] == "finished"]
    if expected_samples is None:
        expected_samples = int(formed[0]["global_batch"]) if formed else 0
    summary = Summary(
        finished=bool(finished),
        steps=len({e["step"] for e in committed}),
        last_step=max((e["step"] for e in committed), default=0),
        generations=len({e["generation"] for e in formed}),
        failures=_failures(events),
        state_lost=[_without(e, "event") for e in events if e["event"] == "state_lost"],
    )
    summary.steps_lost = sum(f.get("steps_lost", 0) for f in summary.failures)

    # A run resumed from a checkpoint begins after the step that its first generation starts with.
    first = formed[0]["step"] + 1 if formed else 1
    wanted: Counter[int] = Counter()
    for step in range(first, summary.last_step + 1):
        wanted.update(_samples(expected_samples, step))
    seen: Counter[int] = Counter()
    for event in committed:
        seen.update(event["samples"])
    summary.samples_lost = (wanted - seen).total()
    summary.samples_repeated = (seen - wanted).total()

    if formed:
        summary.bytes_state = {str(k): int(v) for k, v in formed[-1]["bytes_state"].items()}
        summary.bytes_redundant = {str(k): int(v) for k, v in formed[-1]["bytes_redundant"].items()}
        end = (finished or committed or formed)[-1]["time"]
        summary.seconds = end - formed[0]["time"]
        if summary.seconds > 0:
            tokens = seen.total() * int(formed[0]["seq_len"])
            summary.tokens_per_second = tokens / summary.seconds
    return summary


def write_summary(folder: str | Path) -> Summary:
    """Summarize ``events.jsonl`` of ``folder`` into its ``summary.json``, whole or not at all."""
    folder = Path(folder)
    summary = summarize(read_events(folder / "events.jsonl"))
    target = folder / "summary.json"
    part = folder / f".summary.json.{os.getpid()}"
    with part.open("w") as file:
        json.dump(asdict(summary), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)
    return summary


def _samples(expected: Callable[[int], Iterable[int]] | int, step: int) -> Iterable[int]:
    if isinstance(expected, int):
        return range((step - 1) * expected, step * expected)
    return expected(step)


def _standing(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ``step_committed`` events that were not given up by going back to a checkpoint."""
    standing: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "step_committed":
            standing.append(event)
        elif event["event"] == "recovered" and event.get("action") == "checkpoint":
            standing = [e for e in standing if e["step"] <= event["step"]]
    return standing


def _failures(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    failures: list[dict[str, Any]] = []
    lost: list[str] = []
    phase: str | None = None
    broken: int | None = None
    for event in events:
        if event["event"] == "peer_lost":
            lost += [d for d in event["domains"] if d not in lost]
            if phase is None:
                phase, broken = event["phase"], event["step"]
        elif event["event"] == "recovered":
            failures.append(
                {"domains": lost, "phase": phase, "broken_step": broken, "time": event["time"]}
                | _without(event, *_ALWAYS_SET)
            )
            lost, phase, broken = [], None, None
    return failures


def _without(event: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in keys}


def print_summary(dump_folder: str | Path) -> bool:
    """Tell a reader what happened; False if there is nothing to tell."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width to fit into
    folder = Path(dump_folder)
    folder = folder / "ft" if (folder / "ft").is_dir() else folder
    events = read_events(folder / "events.jsonl")
    if not events:
        console.print(f"No events in {folder}", markup=False)
        return False
    # Anew from the events: an unfinished run has no summary file, or that of an earlier run.
    summary = summarize(events)

    facts = Table.grid(padding=(0, 2))
    end = "finished" if summary.finished else "[bold red]not finished[/]"
    facts.add_row("steps committed", f"{summary.steps} (last: {summary.last_step}), {end}")
    facts.add_row("steps lost", str(summary.steps_lost))
    facts.add_row("samples lost, repeated", f"{summary.samples_lost}, {summary.samples_repeated}")
    facts.add_row("generations", str(summary.generations))
    facts.add_row("tokens per second", f"{summary.tokens_per_second:.0f}")
    for domain, own in summary.bytes_state.items():
        held = summary.bytes_redundant.get(domain, 0)
        share = f" ({held / own:.1%})" if own else ""
        facts.add_row(
            f"domain {domain}",
            f"{own / 2**20:.1f} MiB of its own, {held / 2**20:.1f} MiB for others{share}",
        )
    for lost in summary.state_lost:
        facts.add_row("[bold red]state lost[/]", str(lost.get("message", "")))
    facts.add_row("files", str(folder))
    console.print(facts)

    if summary.failures:
        table = Table(title="Failures, in seconds", title_justify="left", box=box.SIMPLE)
        columns = ("domains", "phase", "detect", "quorum", "build", "restore", "total", "then")
        for column in columns:
            table.add_column(column, justify="right" if column in columns[2:7] else "left")
        for failure in summary.failures:
            seconds = [float(failure.get(f"seconds_{c}", 0.0)) for c in columns[2:7]]
            table.add_row(
                ", ".join(failure["domains"]),
                f"{failure['phase']} of step {failure['broken_step']}",
                *(f"{s:.2f}" for s in seconds),
                str(failure.get("action", "")),
            )
        console.print(table)
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m torchtitan_ft.summary DUMP_FOLDER")
    sys.exit(0 if print_summary(sys.argv[1]) else 1)
