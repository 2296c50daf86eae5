"""The product's promise: a domain dies anywhere in a step, and the run is what it would have been.

Every run here has real processes and real SIGKILLs. To keep the suite short most runs lose several
domains, one after another; every phase is met by some domain and by domain 0, which hosts the store of
its generation, spoke to the lighthouse first, and writes the events.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Run, launch

pytestmark = pytest.mark.integration

STEPS = 20

Kills = list[tuple[int, int, str]]
"""(domain, step, phase)"""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(tmp_path_factory.mktemp("undisturbed"))
    assert run.exit_code == 0, run.output
    assert run.summary["steps"] == STEPS
    assert run.of("peer_lost") == []
    return run


def chaos(kills: Kills) -> str:
    return ";".join(f"kill:domain={d},step={s},phase={p}" for d, s, p in kills)


def assert_nothing_lost(run: Run, undisturbed: Run) -> None:
    """Every step committed once, on its own samples, with the loss it would have had."""
    assert run.exit_code == 0, run.output[-6000:]
    steps = [e["step"] for e in run.of("step_committed")]
    assert steps == list(range(1, STEPS + 1))
    batch = 8
    for event in run.of("step_committed"):
        first = (event["step"] - 1) * batch
        assert event["samples"] == list(range(first, first + batch))
    summary = run.summary
    for key in ("steps_lost", "samples_lost", "samples_repeated"):
        assert summary[key] == 0, summary
    assert summary["steps"] == STEPS
    for step, loss in undisturbed.losses.items():
        assert run.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


def assert_recovered(run: Run, kills: Kills) -> None:
    """One recovery for each kill, each from the step that was right for its phase."""
    recoveries = run.of("recovered")
    assert len(recoveries) == len(kills), recoveries
    assert [e["domains"] for e in run.of("peer_lost")] == [[str(d)] for d, _, _ in kills]
    generations = [e["generation"] for e in run.of("generation_formed")]
    assert generations == sorted(set(generations))
    for (domain, step, phase), recovered, fault in zip(
        kills, recoveries, run.of("chaos"), strict=True
    ):
        assert (fault["domain"], fault["step"], fault["phase"]) == (str(domain), step, phase)
        # From the vote on everybody is prepared: the step must not be thrown away.
        kept = phase in ("vote", "optimizer", "after_commit")
        assert recovered["step"] == (step if kept else step - 1), (phase, recovered)
        assert recovered["steps_lost"] == 0
        assert 0 < recovered["seconds_total"] < 20
    assert len(run.summary["failures"]) == len(kills)


CHAINS: dict[str, Kills] = {
    "a": [(2, 8, "backward"), (0, 14, "after_commit"), (1, STEPS, "backward")],
    # the first step, when there is no optimizer state yet
    "b": [(1, 1, "backward"), (3, 8, "forward"), (0, 15, "backward")],
    "c": [(2, 4, "mirror"), (1, 9, "vote"), (0, 14, "before_step")],
    "d": [(3, 4, "optimizer"), (2, 9, "after_commit"), (0, 14, "vote")],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_kills_in_every_phase(chain: str, tmp_path: Path, undisturbed: Run) -> None:
    run = launch(tmp_path, chaos=chaos(CHAINS[chain]))
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, CHAINS[chain])


def test_death_of_domain_0_between_the_last_vote_and_its_event(
    tmp_path: Path, undisturbed: Run
) -> None:
    """It alone writes events: the others must write what it did not, once."""
    run = launch(tmp_path, chaos=f"kill:domain=0,step={STEPS},phase=optimizer")
    assert_nothing_lost(run, undisturbed)
    (finished,) = run.of("finished")
    assert finished["domain"] != "0"


def test_three_domains(tmp_path: Path, undisturbed: Run) -> None:
    """8 sequences do not divide over 3 ranks; with 2 rows at a time, gradients accumulate."""
    kills = [(0, 5, "forward"), (1, 10, "backward")]
    run = launch(
        tmp_path,
        domains=3,
        chaos=chaos(kills),
        overrides=("--training.local_batch_size", "2"),
    )
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, kills)


def test_five_domains_and_two_deaths_at_the_same_moment(tmp_path: Path, undisturbed: Run) -> None:
    kills = [(0, 5, "mirror"), (1, 10, "backward"), (2, 10, "backward")]
    run = launch(
        tmp_path,
        domains=5,
        chaos=chaos(kills),
        overrides=("--fault_tolerance.overlap", "0.5"),
    )
    assert_nothing_lost(run, undisturbed)
    assert [e["copies"] for e in run.of("generation_formed")][:2] == [3, 2]
    assert run.of("generation_formed")[-1]["domains"] == ["3", "4"]
    lost = [d for e in run.of("peer_lost") for d in e["domains"]]
    assert sorted(lost) == ["0", "1", "2"]


def test_domain_of_two_ranks_leaves_as_a_whole(tmp_path: Path, undisturbed: Run) -> None:
    run = launch(
        tmp_path,
        domains=2,
        ranks=2,
        chaos="kill:domain=0,step=8,phase=backward,rank=1",
        overrides=("--fault_tolerance.overlap", "0.5"),
    )
    assert_nothing_lost(run, undisturbed)
    assert_recovered(run, [(0, 8, "backward")])
    assert run.of("generation_formed")[-1]["domains"] == ["1"]


def test_overlap_0_and_a_death_end_with_advice(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        chaos="kill:domain=2,step=3,phase=backward",
        overrides=("--fault_tolerance.overlap", "0.0"),
        timeout=150,
    )
    assert run.exit_code != 0
    for advice in ("nobody holds a copy", "fault_tolerance.overlap", "[checkpoint]"):
        assert advice in run.output
    assert not (tmp_path / "ft" / "summary.json").exists()
    (formed,) = run.of("generation_formed")
    assert formed["copies"] == 0
    assert set(formed["bytes_redundant"].values()) == {0}


def test_redundancy_is_reported(undisturbed: Run) -> None:
    (formed,) = undisturbed.of("generation_formed")
    assert formed["copies"] == 1
    state, redundant = undisturbed.summary["bytes_state"], undisturbed.summary["bytes_redundant"]
    assert set(state) == set(redundant) == {"0", "1", "2", "3"}
    # copies/N of the whole state: each domain holds one other's shard, as large as its own
    assert sum(redundant.values()) == sum(state.values())
    assert all(v > 0 for v in redundant.values())


def test_live_lines_and_torchtitans_own_console_lines(undisturbed: Run) -> None:
    assert "step: 20" in undisturbed.output
    assert "generation 1 formed" in undisturbed.output
