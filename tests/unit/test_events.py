"""The event file: whole lines whatever happens to its writers."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_ft.events import EventLog, last_committed, parse_line, read_events, rotate

WRITER = """
import sys
from torchtitan_ft.events import EventLog
log = EventLog(sys.argv[1], sys.argv[2], 0)
for step in range(int(sys.argv[3])):
    log.write("step_committed", generation=1, step=step, loss=step / 3, samples=list(range(300)))
"""


def test_an_event_has_its_keys_in_order_and_floats_at_full_precision(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "ft" / "events.jsonl", domain="3", rank=1)
    before = time.time()
    log.write("step_committed", generation=2, step=7, loss=0.1 + 0.2, samples=[1, 2])
    (event,) = read_events(log.path)
    assert list(event)[:6] == ["time", "domain", "rank", "generation", "step", "event"]
    assert before <= event.pop("time") <= time.time()
    assert event == {
        "domain": "3",
        "rank": 1,
        "generation": 2,
        "step": 7,
        "event": "step_committed",
        "loss": 0.1 + 0.2,
        "samples": [1, 2],
    }


def test_a_field_cannot_replace_a_key_of_the_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "0", 0)
    with pytest.raises(ValueError, match="domain"):
        log.write("x", generation=1, step=1, domain="1")


def test_values_json_lacks_are_strings_that_float_reads(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "0", 0)
    log.write("x", generation=1, step=1, a=float("nan"), b=[float("inf")], c={"d": -float("inf")})
    (event,) = read_events(log.path)
    assert (event["a"], event["b"], event["c"]) == ("NaN", ["Infinity"], {"d": "-Infinity"})
    assert float(event["c"]["d"]) == -float("inf")


def test_four_processes_write_and_one_is_killed_but_lines_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(d), "1000000" if d == 3 else "500"]
        )
        for d in range(4)
    ]
    for writer in writers[:3]:
        assert writer.wait(60) == 0
    writers[3].send_signal(signal.SIGKILL)
    assert writers[3].wait(60) == -signal.SIGKILL
    lines = path.read_bytes().splitlines()
    events = read_events(path)
    for domain in "012":
        assert [e["step"] for e in events if e["domain"] == domain] == list(range(500))
    killed = [e["step"] for e in events if e["domain"] == "3"]
    assert killed
    assert killed == list(range(len(killed)))
    # Nothing interleaved: every line is an event, but for empty ones and the one cut by the kill.
    assert sum(1 for line in lines if line and parse_line(line) is None) <= 1


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "0", 0)
    log.write("a", generation=1, step=1)
    with path.open("a") as file:
        file.write('{"time": 1.0, "domain": "1", "ra')
    log.write("b", generation=1, step=2)
    assert [e["event"] for e in read_events(path)] == ["a", "b"]
    # The same when the writer looked at the end of the file just before it was torn.
    with path.open("a") as file:
        file.write('{"time": 1.0, "domai{"time": 2.0, "event": "c", "step": 3}\n')
    assert [e["event"] for e in read_events(path)] == ["a", "b", "c"]


def test_a_full_disk_costs_the_event_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl", "0", 0)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def part(fd: int, data: bytes) -> int:
        return real(fd, data[:20])

    for write in (full, part, real):
        monkeypatch.setattr(os, "write", write)
        log.write(write.__name__, generation=1, step=1)
    assert [e["event"] for e in read_events(log.path)] == ["write"]


def test_rotate_keeps_every_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert rotate(path) is None
    for number in (1, 2, 3):
        path.write_text(str(number))
        assert rotate(path) == tmp_path / f"events.{number}.jsonl"
        assert not path.exists()
    assert (tmp_path / "events.2.jsonl").read_text() == "2"


def test_last_committed_looks_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert last_committed(path) is None
    log = EventLog(path, "0", 0)
    log.write("generation_formed", generation=1, step=0)
    assert last_committed(path) is None
    log.write("step_committed", generation=1, step=5, samples=list(range(50_000)))
    for _ in range(1000):
        log.write("other", generation=1, step=9, text="x" * 200)
    assert last_committed(path) == 5
    with path.open("a") as file:
        file.write(json.dumps({"time": 1, "step": 6, "event": "step_committed"})[:-3])
    assert last_committed(path) == 5
    log.write("step_committed", generation=1, step=6)
    assert last_committed(path) == 6
