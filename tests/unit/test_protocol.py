import itertools
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.recovery.protocol import (
    Decision,
    HeldState,
    Ledger,
    Report,
    decide,
    merge,
    read_reports,
)

NAMES = ("0", "1", "2", "3")


def held(committed: int, prepared: int, generation: int = 1, copies: int = 1) -> HeldState:
    return HeldState(generation, NAMES, copies, committed, prepared)


def test_nobody_has_state() -> None:
    assert decide([Report("0"), Report("1")]) == Decision("start")


def test_unprepared_survivor_means_rerun() -> None:
    reports = [Report("0", (held(7, 8),)), Report("1", (held(7, 7),)), Report("3", (held(7, 8),))]
    assert decide(reports) == Decision("rerun", generation=1, step=7)


def test_all_prepared_means_roll_forward_even_if_nobody_alive_has_committed() -> None:
    reports = [Report(d, (held(7, 8),)) for d in ("0", "1", "3")]
    assert decide(reports) == Decision("roll_forward", generation=1, step=8)


def test_one_commit_pulls_the_others() -> None:
    reports = [Report("0", (held(8, 8),)), Report("1", (held(7, 8),)), Report("3", (held(7, 8),))]
    assert decide(reports) == Decision("roll_forward", generation=1, step=8)


def test_all_committed_continue() -> None:
    reports = [Report(d, (held(8, 8),)) for d in ("0", "1", "3")]
    assert decide(reports) == Decision("rerun", generation=1, step=8)


def test_neighbours_dead_with_one_copy_is_lost_and_named() -> None:
    reports = [Report("0", (held(7, 7),)), Report("3", (held(7, 7),))]
    assert decide(reports) == Decision("lost", step=7, lost=("1",))


def test_newcomer_only_receives() -> None:
    reports = [Report("0", (held(7, 7),)), Report("1", (held(7, 7),)), Report("2", (held(7, 7),))]
    assert decide([*reports, Report("9")]) == Decision("rerun", generation=1, step=7)


def test_failure_during_restore_uses_the_generation_all_have() -> None:
    # "0" had restored generation 2 already, "1" and "3" had not.
    new = HeldState(2, ("0", "1", "3"), 1, 7, 7)
    reports = [
        Report("0", (held(7, 7), new)),
        Report("1", (held(7, 7),)),
        Report("3", (held(7, 7),)),
    ]
    assert decide(reports) == Decision("rerun", generation=1, step=7)
    everybody = [Report(d, (held(7, 7), new)) for d in ("0", "1", "3")]
    assert decide(everybody) == Decision("rerun", generation=2, step=7)


def test_one_that_had_no_older_state_does_not_hide_it() -> None:
    # "9" joined in generation 2 and restored; "1" failed to: nobody can have committed in it.
    new = HeldState(2, ("0", "1", "9"), 1, 7, 7)
    whole = HeldState(1, ("0", "1"), 0, 7, 7)
    reports = [Report("0", (whole, new)), Report("1", (whole,)), Report("9", (new,))]
    assert decide(reports) == Decision("rerun", generation=1, step=7)


def test_a_shard_that_was_handed_over_is_not_lost() -> None:
    alone = HeldState(1, ("0", "1"), 0, 7, 7)
    assert decide([Report("0", (alone,))]) == Decision("lost", step=7, lost=("1",))
    heir = replace(alone, extra=(1,))
    assert decide([Report("0", (heir,))]) == Decision("rerun", generation=1, step=7)


def test_the_ledger_keeps_the_source_until_the_first_commit() -> None:
    ledger = Ledger()
    ledger.restored(1, NAMES, 1, 0)
    ledger.prepare(1)
    ledger.commit(1)
    ledger.prepare(2)
    assert ledger.held == (HeldState(1, NAMES, 1, 1, 2),)
    assert ledger.settle(Decision("roll_forward", generation=1, step=2))
    assert ledger.held == (HeldState(1, NAMES, 1, 2, 2),)
    ledger.restored(2, NAMES[:3], 1, 2)
    assert [h.generation for h in ledger.held] == [1, 2]
    ledger.prepare(3)
    ledger.commit(3)
    assert ledger.held == (HeldState(2, NAMES[:3], 1, 3, 3),)
    # A prepared step that is not agreed on is abandoned; what is lost stays lost.
    ledger.prepare(4)
    assert not ledger.settle(Decision("rerun", generation=2, step=3))
    assert ledger.held == (HeldState(2, NAMES[:3], 1, 3, 3),)
    assert not ledger.settle(Decision("lost", step=3, lost=("1",)))
    assert ledger.held == (HeldState(2, NAMES[:3], 1, 3, 3),)


def test_the_ledger_refuses_a_step_that_was_not_prepared() -> None:
    ledger = Ledger()
    ledger.restored(1, NAMES, 1, 7)
    with pytest.raises(AssertionError):
        ledger.settle(Decision("roll_forward", generation=1, step=8))


def test_domain_is_as_prepared_as_its_least_rank() -> None:
    assert merge([[held(7, 8)], [held(7, 7)]]) == (held(7, 7),)
    assert merge([[held(8, 8)], [held(7, 8)]]) == (held(8, 8),)
    # what one rank lacks, the domain lacks
    assert merge([[held(7, 7), held(7, 7, generation=2)], [held(7, 7)]]) == (held(7, 7),)
    assert merge([[], [held(7, 7)]]) == ()


def test_reports_survive_the_wire() -> None:
    wire = json.loads(json.dumps([[[asdict(held(7, 8))], [asdict(held(7, 7))]], [[], []]]))
    assert read_reports(["0", "1"], wire) == [Report("0", (held(7, 7),)), Report("1")]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_crash_point_of_a_step(ranks: int) -> None:
    """All interleavings: each rank stops unprepared, prepared, or committed; some die.

    A rank commits only after all are prepared. Whatever the dead did, survivors must agree, must
    never abandon a step somebody committed, and never apply one that somebody was not prepared for.
    """
    names = NAMES[:ranks]
    for states in itertools.product(("running", "prepared", "committed"), repeat=ranks):
        if "committed" in states and "running" in states:
            continue  # the vote cannot have passed
        for dead in itertools.product((False, True), repeat=ranks):
            live = [i for i in range(ranks) if not dead[i]]
            if not live or len(live) < ranks - 1:
                continue
            point = {"running": (7, 7), "prepared": (7, 8), "committed": (8, 8)}
            reports = [Report(names[i], (HeldState(1, names, 1, *point[states[i]]),)) for i in live]
            decision = decide(reports)
            if "committed" in states:
                assert decision.step == 8, (states, dead)
            if any(states[i] == "running" for i in live):
                assert decision.step == 7, (states, dead)


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.permutations(range(n)))
    )
)
def test_the_order_of_reports_does_not_matter(case: tuple[int, int, list[int]]) -> None:
    n, copies, order = case
    names = tuple(str(i) for i in range(n))
    reports = [Report(d, (HeldState(3, names, copies, 5, 6),)) for d in names]
    assert decide([reports[i] for i in order]) == decide(reports)
