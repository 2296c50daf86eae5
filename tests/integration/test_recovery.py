"""The product's promise: a domain dies anywhere in a step, and the run is what it would have been."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Run, launch

pytestmark = pytest.mark.integration

STEPS = 20
KILL_STEP = 8


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(tmp_path_factory.mktemp("undisturbed"))
    assert run.exit_code == 0, run.output
    assert run.summary["steps"] == STEPS
    assert run.of("peer_lost") == []
    return run


def assert_nothing_lost(run: Run, undisturbed: Run) -> None:
    """Every step committed once, on its own samples, with the loss it would have had."""
    assert run.exit_code == 0, run.output[-6000:]
    steps = [e["step"] for e in run.of("step_committed")]
    assert steps == list(range(1, STEPS + 1))
    batch = len(undisturbed.of("step_committed")[0]["samples"])
    for event in run.of("step_committed"):
        first = (event["step"] - 1) * batch
        assert event["samples"] == list(range(first, first + batch))
    summary = run.summary
    for key in ("steps_lost", "samples_lost", "samples_repeated"):
        assert summary[key] == 0, summary
    assert summary["steps"] == STEPS
    for step, loss in undisturbed.losses.items():
        assert run.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


def assert_recovered(run: Run, domains: list[str], live: list[str]) -> dict:
    (lost,) = run.of("peer_lost")
    assert lost["domains"] == domains
    (recovered,) = run.of("recovered")
    assert run.of("generation_formed")[-1]["domains"] == live
    assert run.summary["failures"] == [recovered] or run.summary["generations"] >= 2
    return recovered


PHASES = {
    "before_step": "rerun",
    "forward": "rerun",
    "backward": "rerun",
    "mirror": "rerun",
    "vote": "roll_forward",
    "optimizer": "roll_forward",
    "after_commit": "rerun",
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_in_every_phase(phase: str, tmp_path: Path, undisturbed: Run) -> None:
    run = launch(tmp_path, chaos=f"kill:domain=2,step={KILL_STEP},phase={phase}")
    assert_nothing_lost(run, undisturbed)
    recovered = assert_recovered(run, ["2"], ["0", "1", "3"])
    committed = KILL_STEP if PHASES[phase] == "roll_forward" or phase == "after_commit" else None
    assert recovered["action"] in (PHASES[phase], "roll_forward", "rerun")
    if committed is not None:
        assert recovered["step"] == committed, "a step all were prepared for was thrown away"
    else:
        assert recovered["step"] == KILL_STEP - 1
    (chaos,) = run.of("chaos")
    assert (chaos["domain"], chaos["step"], chaos["phase"]) == ("2", KILL_STEP, phase)


@pytest.mark.parametrize("phase", ["before_step", "backward", "vote", "optimizer", "after_commit"])
def test_kill_of_domain_0(phase: str, tmp_path: Path, undisturbed: Run) -> None:
    """It hosts the generation's store and writes the events."""
    run = launch(tmp_path, chaos=f"kill:domain=0,step={KILL_STEP},phase={phase}")
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, ["0"], ["1", "2", "3"])


@pytest.mark.parametrize("step", [1, 20])
def test_kill_in_the_first_and_the_last_step(step: int, tmp_path: Path, undisturbed: Run) -> None:
    run = launch(tmp_path, chaos=f"kill:domain=1,step={step},phase=backward")
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, ["1"], ["0", "2", "3"])


def test_kill_after_the_last_commit(tmp_path: Path, undisturbed: Run) -> None:
    run = launch(tmp_path, chaos="kill:domain=0,step=20,phase=optimizer")
    assert_nothing_lost(run, undisturbed)


@pytest.mark.parametrize("domains", [3, 5])
def test_other_world_sizes(domains: int, tmp_path: Path, undisturbed: Run) -> None:
    """The same job on 3 and 5 domains: 8 sequences divide over neither, nor over 2."""
    run = launch(
        tmp_path, domains=domains, chaos=f"kill:domain=1,step={KILL_STEP},phase=backward"
    )
    assert_nothing_lost(run, undisturbed)


def test_two_domains_at_the_same_moment(tmp_path: Path, undisturbed: Run) -> None:
    run = launch(
        tmp_path,
        chaos=(
            f"kill:domain=1,step={KILL_STEP},phase=backward;"
            f"kill:domain=2,step={KILL_STEP},phase=backward"
        ),
        overrides=("--fault_tolerance.overlap", "0.5"),
    )
    assert_nothing_lost(run, undisturbed)
    assert run.of("generation_formed")[-1]["domains"] == ["0", "3"]
    lost = sorted(d for e in run.of("peer_lost") for d in e["domains"])
    assert lost == ["1", "2"]


def test_one_after_another_down_to_one(tmp_path: Path, undisturbed: Run) -> None:
    run = launch(
        tmp_path,
        chaos=(
            "kill:domain=3,step=5,phase=vote;"
            "kill:domain=0,step=9,phase=backward;"
            "kill:domain=2,step=13,phase=optimizer"
        ),
    )
    assert_nothing_lost(run, undisturbed)
    assert [len(e["domains"]) for e in run.of("generation_formed")] == [4, 3, 2, 1]
    assert len(run.summary["failures"]) == 3


def test_domain_of_two_ranks_leaves_as_a_whole(tmp_path: Path, undisturbed: Run) -> None:
    run = launch(
        tmp_path,
        domains=2,
        ranks=2,
        chaos=f"kill:domain=0,step={KILL_STEP},phase=backward,rank=1",
        overrides=("--fault_tolerance.overlap", "0.5"),
    )
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, ["0"], ["1"])


def test_overlap_0_and_a_death_end_with_advice(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        chaos=f"kill:domain=2,step={KILL_STEP},phase=backward",
        overrides=("--fault_tolerance.overlap", "0.0"),
        timeout=120,
    )
    assert run.exit_code != 0
    assert "nobody holds a copy" in run.output
    assert "fault_tolerance.overlap" in run.output
    assert "[checkpoint]" in run.output
    assert not (tmp_path / "ft" / "summary.json").exists()


def test_redundancy_is_reported(undisturbed: Run) -> None:
    (formed,) = undisturbed.of("generation_formed")
    assert formed["copies"] == 1
    state, redundant = undisturbed.summary["bytes_state"], undisturbed.summary["bytes_redundant"]
    assert set(state) == set(redundant) == {"0", "1", "2", "3"}
    # copies/N of the whole state: each domain holds one other's shard, as large as its own
    assert sum(redundant.values()) == sum(state.values())
    assert all(v > 0 for v in redundant.values())
