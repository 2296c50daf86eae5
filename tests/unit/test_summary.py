"""The account of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ft.events import EventLog
from torchtitan_ft.summary import print_summary, summarize, write_summary


def event(name: str, time: float, step: int, generation: int = 1, **fields: Any) -> dict[str, Any]:
    head = {"time": time, "domain": "0", "rank": 0, "generation": generation, "step": step}
    return {**head, "event": name, **fields}


def formed(time: float, step: int, generation: int, domains: list[str]) -> dict[str, Any]:
    return event(
        "generation_formed",
        time,
        step,
        generation,
        domains=domains,
        copies=1,
        bytes_state=dict.fromkeys(domains, 1000),
        bytes_redundant=dict.fromkeys(domains, 500),
        seq_len=10,
        global_batch=2,
    )


def committed(step: int, generation: int = 1, samples: list[int] | None = None) -> dict[str, Any]:
    samples = [2 * step - 2, 2 * step - 1] if samples is None else samples
    return event("step_committed", 100.0 + step, step, generation, samples=samples)


RECOVERED = {
    "seconds_detect": 0.1,
    "seconds_quorum": 0.5,
    "seconds_build": 0.4,
    "seconds_restore": 0.1,
    "seconds_total": 1.1,
    "action": "rerun",
    "steps_lost": 0,
}


def run() -> list[dict[str, Any]]:
    return [
        formed(100.0, 0, 1, ["0", "1", "2"]),
        committed(1),
        event("chaos", 101.5, 2, action="kill", phase="vote"),
        event("peer_lost", 102.0, 2, domains=["1"], phase="vote"),
        event("peer_lost", 102.1, 2, domains=["2"], phase="build"),
        formed(103.0, 1, 2, ["0"]),
        event("recovered", 103.1, 1, 2, **RECOVERED),
        committed(2, 2),
        committed(3, 2),
        event("finished", 104.0, 3, 2),
    ]


def test_a_run_with_a_failure_that_cost_nothing() -> None:
    summary = summarize(run())
    assert (summary.finished, summary.steps, summary.last_step) == (True, 3, 3)
    assert (summary.steps_lost, summary.samples_lost, summary.samples_repeated) == (0, 0, 0)
    assert summary.generations == 2
    assert summary.failures == [
        {
            "domains": ["1", "2"],
            "phase": "vote",
            "broken_step": 2,
            "time": 103.1,
            "generation": 2,
            "step": 1,
            **RECOVERED,
        }
    ]
    assert summary.bytes_state == {"0": 1000}
    assert summary.bytes_redundant == {"0": 500}
    assert summary.seconds == 4.0
    assert summary.tokens_per_second == 6 * 10 / 4.0


def test_a_step_committed_twice_is_repeated_samples() -> None:
    summary = summarize([*run(), committed(2)])
    assert (summary.steps, summary.samples_lost, summary.samples_repeated) == (3, 0, 2)


def test_steps_given_up_for_a_checkpoint_are_lost_not_repeated() -> None:
    events = [
        formed(100.0, 0, 1, ["0", "1", "2"]),
        *(committed(step) for step in (1, 2, 3)),
        event("peer_lost", 104.0, 4, domains=["1", "2"], phase="forward"),
        event("recovered", 105.0, 1, 2, **{**RECOVERED, "action": "checkpoint", "steps_lost": 2}),
        *(committed(step, 2) for step in (2, 3, 4)),
        event("finished", 110.0, 4, 2),
    ]
    summary = summarize(events)
    assert (summary.steps, summary.steps_lost) == (4, 2)
    assert (summary.samples_lost, summary.samples_repeated) == (0, 0)


def test_a_missing_step_and_a_wrong_sample_are_counted() -> None:
    events = [e for e in run() if (e["event"], e["step"]) != ("step_committed", 2)]
    assert summarize(events).samples_lost == 2
    wrong = [formed(100.0, 0, 1, ["0"]), committed(1, samples=[0, 0])]
    summary = summarize(wrong)
    assert (summary.samples_lost, summary.samples_repeated) == (1, 1)
    assert not summary.finished


def test_expected_samples_may_be_given() -> None:
    assert summarize(run(), expected_samples=3).samples_lost == 3
    assert summarize(run(), expected_samples=lambda t: [2 * t - 2, 2 * t - 1]).samples_lost == 0
    assert summarize(run(), expected_samples=lambda t: [99]).samples_repeated == 6


def test_a_resumed_run_answers_for_its_own_steps() -> None:
    events = [formed(100.0, 5, 1, ["0"]), committed(6), committed(7)]
    summary = summarize(events)
    assert (summary.steps, summary.last_step, summary.samples_lost) == (2, 7, 0)


def test_steps_and_state_lost() -> None:
    events = run()
    events[6]["steps_lost"] = 4
    events.append(event("state_lost", 105.0, 3, domains=["1"], message="gone"))
    summary = summarize(events)
    assert summary.steps_lost == 4
    assert summary.state_lost[0]["message"] == "gone"


def test_no_events_make_an_empty_summary() -> None:
    summary = summarize([])
    assert (summary.finished, summary.steps, summary.tokens_per_second) == (False, 0, 0.0)


def test_the_file_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "ft" / "events.jsonl", "0", 0)
    for e in run():
        fields = {k: v for k, v in e.items() if k not in ("time", "domain", "rank", "event")}
        log.write(e["event"], **fields)
    summary = write_summary(log.path.parent)
    saved = json.loads((tmp_path / "ft" / "summary.json").read_text())
    assert saved["steps"] == summary.steps == 3
    assert saved["failures"][0]["domains"] == ["1", "2"]
    assert {p.name for p in log.path.parent.iterdir()} == {"events.jsonl", "summary.json"}
    assert print_summary(tmp_path)
    text = capsys.readouterr().out
    assert "vote of step 2" in text
    assert "1.10" in text


def test_a_folder_without_events_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not print_summary(tmp_path)
    assert "No events" in capsys.readouterr().out
