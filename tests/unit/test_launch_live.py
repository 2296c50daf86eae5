"""What the launcher makes of events."""

from pathlib import Path
from typing import Any

from rich.console import Console

from torchtitan_ft.events import EventLog, rotate
from torchtitan_ft.launch.live import EventTail, RunView, describe_event, is_trouble


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "generation": 1, "step": 0, "domain": "0", "rank": 0, **fields}


def states(view: RunView) -> list[str]:
    return [domain.state for domain in view.domains.values()]


def test_the_states_of_domains() -> None:
    view = RunView(["0", "1", "2"])
    assert states(view) == ["starting"] * 3
    view.apply(event("generation_formed", domains=["0", "1", "2"]))
    view.apply(event("step_committed", step=1, loss=2.0, seconds=0.5))
    assert states(view) == ["training"] * 3
    assert view.shown() == "0"
    view.apply(event("chaos", domain="0", action="kill", phase="vote"))
    assert states(view) == ["lost", "recovering", "recovering"]
    assert view.shown() == "1"
    view.exited("0", 1)
    view.apply(event("generation_formed", generation=2, domains=["1", "2"]))
    view.apply(event("step_committed", generation=2, step=2, loss="NaN", seconds=0.5))
    assert states(view) == ["lost", "training", "training"]
    assert (view.domains["0"].step, view.domains["1"].step) == (1, 2)
    view.exited("1", 1)
    assert states(view) == ["lost", "lost", "recovering"]
    view.apply(event("step_committed", generation=3, step=3))
    view.apply(event("finished", step=3))
    assert states(view) == ["lost", "lost", "finished"]
    assert view.shown() is None
    console = Console(width=100)
    with console.capture() as capture:
        console.print(view.table())
    assert "nan" in capture.get()


def test_a_domain_that_ends_before_its_first_generation_failed() -> None:
    view = RunView(["0", "1"])
    view.exited("1", 1)
    assert states(view) == ["starting", "failed"]


def test_domains_that_come_and_go() -> None:
    view = RunView(["0", "1", "2", "3"])
    view.apply(event("generation_formed", domains=["0", "1", "2", "3"]))
    view.apply(event("chaos", domain="1", action="restart", phase="vote"))
    view.exited("1", 1)
    assert states(view) == ["recovering", "lost", "recovering", "recovering"]
    view.started("1")
    assert states(view)[1] == "starting"
    view.apply(event("chaos", domain="2", action="stop", phase="vote"))
    view.apply(event("chaos", domain="3", action="term", phase="vote"))
    view.apply(event("chaos", domain="elsewhere", action="kill", phase="vote"))
    assert states(view)[1:] == ["starting", "stopped", "leaving"]
    view.exited("3", 0)
    view.apply(event("generation_formed", domains=["0", "2"]))
    view.apply(event("domain_left", domains=["3"]))
    assert states(view) == ["training", "starting", "training", "left"]
    # The first of those that finish ends before its last event is read.
    view.exited("2", 0)
    assert states(view)[2] == "left"
    view.apply(event("finished"))
    view.exited("0", 0)
    view.exited("1", -9)
    assert states(view) == ["finished", "unused", "finished", "left"]


def test_the_tail_follows_rotation_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "0", 0)
    log.write("old", generation=1, step=0)
    tail = EventTail(path)
    assert tail.poll() == []
    rotate(path)
    assert tail.poll() == []
    log.write("new", generation=1, step=0)
    text = path.read_text()
    assert [e["event"] for e in tail.poll()] == ["new"]
    with path.open("a") as file:
        file.write(text[:30])
    assert tail.poll() == []
    with path.open("a") as file:
        file.write(text[30:])
    assert [e["event"] for e in tail.poll()] == ["new"]
    path.unlink()
    assert tail.poll() == []


def test_a_tail_may_begin_before_the_file(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "ft" / "events.jsonl")
    assert tail.poll() == []
    EventLog(tmp_path / "ft" / "events.jsonl", "0", 0).write("new", generation=1, step=0)
    assert len(tail.poll()) == 1


def test_events_for_people() -> None:
    assert describe_event(event("step_committed")) is None
    lost = event("peer_lost", step=8, domains=["2"], phase="backward")
    assert describe_event(lost) == "lost in backward of step 8: 2"
    recovered = event("recovered", step=7, seconds_total=1.234, action="rerun", steps_lost=0)
    assert describe_event(recovered) == "recovered in 1.23 s (rerun after step 7, 0 steps lost)"


def test_trouble() -> None:
    assert is_trouble("[titan] 2026-01-01 00:00:00,000 - root - WARNING - careful")
    assert is_trouble("[rank0]: ValueError: no")
    assert is_trouble("torch.OutOfMemoryError: no")
    assert not is_trouble("[titan] 2026-01-01 00:00:00,000 - root - INFO - Error: none")
    assert not is_trouble("E1201 05:00:01.2 1 torch/distributed/elastic/x.py:9] exitcode: 1")
