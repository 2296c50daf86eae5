import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.data.order import BatchPlan, sequence_of

plans = st.builds(BatchPlan, st.integers(1, 70), st.integers(1, 12), st.integers(1, 9))


def samples(plan: BatchPlan, rank: int) -> list[int]:
    slots = [
        plan.sample(rank, m, r)
        for m in range(plan.accumulation_steps)
        for r in range(plan.local_batch)
    ]
    return [s for s in slots if s is not None]


@given(plans)
def test_every_sample_is_read_once(plan: BatchPlan) -> None:
    read = [s for rank in range(plan.degree) for s in samples(plan, rank)]
    assert sorted(read) == list(range(plan.global_batch))


@given(plans)
def test_ranks_differ_by_one_sample_and_rows_fit(plan: BatchPlan) -> None:
    sizes = [len(samples(plan, rank)) for rank in range(plan.degree)]
    assert max(sizes) - min(sizes) <= 1
    assert plan.local_batch <= plan.local_batch_limit
    # no microbatch more than needed, and less than one row of padding in each
    padding = plan.local_batch * plan.accumulation_steps - max(sizes)
    assert 0 <= padding < plan.accumulation_steps


@given(plans)
def test_planning_with_the_planned_rows_changes_nothing(plan: BatchPlan) -> None:
    """The trainer plans, and the loader again from what torchtitan passes on."""
    again = BatchPlan(plan.global_batch, plan.degree, plan.local_batch)
    assert again.local_batch == plan.local_batch
    assert again.accumulation_steps == plan.accumulation_steps


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_sequence_once(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    first = epoch * n
    found = [sequence_of(i, n, seed=seed, shuffle=shuffle) for i in range(first, first + n)]
    assert sorted(found) == list(range(n))


def test_epochs_and_seeds_differ_when_shuffled() -> None:
    def epoch(start: int, seed: int) -> list[int]:
        return [sequence_of(i, 50, seed=seed, shuffle=True) for i in range(start, start + 50)]

    assert epoch(0, 1) != epoch(50, 1) != epoch(50, 2)
    assert epoch(0, 1) == epoch(0, 1)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="degree must be at least 1"):
        BatchPlan(8, 0, 1)


def test_needs_no_torch() -> None:
    code = "import sys, torchtitan_ft.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
