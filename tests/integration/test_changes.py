"""Domains come back, hang, leave and are cut off while the others go on: real processes and signals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs import Run, launch

pytestmark = pytest.mark.integration


def assert_exact(run: Run, steps: int, reference: Run | None = None) -> None:
    """Every step committed once, on its own samples."""
    assert run.exit_code == 0, run.output[-6000:]
    committed = run.of("step_committed")
    assert [e["step"] for e in committed] == list(range(1, steps + 1))
    for event in committed:
        first = (event["step"] - 1) * 8
        assert event["samples"] == list(range(first, first + 8))
    for key in ("steps_lost", "samples_lost", "samples_repeated"):
        assert run.summary[key] == 0
    generations = [e["generation"] for e in run.of("generation_formed")]
    assert generations == sorted(set(generations))
    if reference is not None:
        for step, loss in run.losses.items():
            if step in reference.losses:
                assert loss == pytest.approx(reference.losses[step], rel=1e-5), step


def joined(run: Run) -> list[str]:
    return [d for e in run.of("domain_joined") for d in e["domains"]]


def test_killed_stopped_and_hanging_domains_come_back(tmp_path: Path) -> None:
    """A death and a new process; a stopped process that wakes and finds itself fenced; a stuck one."""
    run = launch(
        tmp_path,
        chaos="restart:domain=0,step=3,phase=backward,after=0.1;"
        "stop:domain=1,step=24,phase=forward,for=4;"
        "hang:domain=2,step=40,phase=forward,for=12",
        overrides=("--training.steps", "60"),
        timeout=280,
    )
    assert_exact(run, 60)
    assert joined(run) == ["0", "1", "2"]
    assert run.of("generation_formed")[-1]["domains"] == ["0", "1", "2", "3"]
    lost = [(e["domains"], e["phase"]) for e in run.of("peer_lost")]
    assert [domains for domains, _ in lost] == [["0"], ["1"], ["2"]]
    killed, stopped, hung = run.of("recovered")
    assert killed["seconds_detect"] < 0.5
    # failure_timeout_seconds is 0.5: noticed within twice that, and a little for a busy machine
    assert 0.4 < stopped["seconds_detect"] < 1.5
    assert hung["seconds_total"] < 20
    for event in run.of("domain_joined"):
        assert event["seconds_stall"] < 5
    # The fenced process wrote no event of a generation it was not in.
    formed = {e["generation"]: e["domains"] for e in run.of("generation_formed")}
    assert all(e["domain"] in formed[e["generation"]] for e in run.of("step_committed"))


def test_a_domain_leaves_without_a_copy_of_its_shard(tmp_path: Path) -> None:
    """SIGTERM: the step is finished, the shard handed over, and no step is run again."""
    run = launch(
        tmp_path,
        domains=3,
        chaos="term:domain=1,step=4,phase=forward;term:domain=0,step=7,phase=backward",
        overrides=("--training.steps", "10", "--fault_tolerance.overlap", "0.0"),
    )
    assert_exact(run, 10)
    assert [e["domains"] for e in run.of("domain_left")] == [["1"], ["0"]]
    assert [e["step"] for e in run.of("domain_left")] == [4, 7]
    assert run.of("peer_lost") == run.of("recovered") == []
    # No generation more: those that leave are not taken for domains that ask to come.
    assert [e["domains"] for e in run.of("generation_formed")] == [
        ["0", "1", "2"],
        ["0", "2"],
        ["2"],
    ]


def test_deaths_during_a_recovery(tmp_path: Path) -> None:
    """While the next generation is built, then in the middle of its restore: one after the other, down
    to one domain."""
    run = launch(
        tmp_path,
        domains=5,
        chaos="kill:domain=2,step=4,phase=backward;kill:domain=0,step=4,phase=build;"
        "kill:domain=1,step=7,phase=backward;kill:domain=4,step=7,phase=recovery",
        overrides=("--training.steps", "10", "--fault_tolerance.overlap", "0.4"),
    )
    assert_exact(run, 10)
    assert run.of("generation_formed")[-1]["domains"] == ["3"]


def test_beyond_the_overlap_the_checkpoint_is_taken(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        chaos="kill:domain=1,step=8,phase=backward;kill:domain=2,step=8,phase=backward",
        overrides=(
            *("--training.steps", "10"),
            *("--checkpoint.enable", "--checkpoint.interval", "5"),
        ),
    )
    assert run.exit_code == 0, run.output[-6000:]
    (recovered,) = run.of("recovered")
    assert recovered["action"] == "checkpoint"
    assert recovered["steps_lost"] == 2  # 6 and 7 were committed after the checkpoint of step 5
    steps = [e["step"] for e in run.of("step_committed")]
    assert steps == [*range(1, 8), *range(6, 11)]
    summary = run.summary
    assert (summary["steps_lost"], summary["samples_lost"], summary["samples_repeated"]) == (
        2,
        0,
        0,
    )
    again = {e["step"]: e["loss"] for e in run.of("step_committed")[:7]}
    for event in run.of("step_committed")[7:]:
        if event["step"] in again:
            assert event["loss"] == pytest.approx(again[event["step"]], rel=1e-5)


def test_too_few_domains_save_what_they_have(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        domains=2,
        chaos="kill:domain=1,step=4,phase=backward",
        overrides=(
            *("--training.steps", "20", "--fault_tolerance.overlap", "0.5"),
            *("--fault_tolerance.min_domains", "2"),
            *("--fault_tolerance.min_domains_timeout_seconds", "3"),
        ),
    )
    assert run.exit_code != 0
    assert "min_domains = 2" in run.output
    assert (tmp_path / "checkpoint" / "step-3" / ".metadata").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_partition_and_a_lighthouse_that_forgets(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        domains=3,
        chaos="kill_lighthouse:domain=0,step=3,phase=forward,after=1;"
        "partition:domain=2,step=8,phase=forward,for=4",
        overrides=("--training.steps", "40", "--fault_tolerance.overlap", "0.34"),
    )
    assert_exact(run, 40)
    assert joined(run) == ["2"]
