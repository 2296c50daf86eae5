"""The text of faults: strict, and helpful when it is wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.launch.chaos import (
    ACTIONS,
    PHASES,
    Fault,
    Schedule,
    away_steps,
    draw,
    is_random,
    matching,
    parse,
)


def test_a_specification_is_read_and_written() -> None:
    spec = "kill:domain=2,step=8,phase=backward;kill:domain=0,step=1,phase=vote,rank=3"
    faults = parse(spec)
    assert faults == (Fault("kill", "2", 8, "backward"), Fault("kill", "0", 1, "vote", 3))
    assert ";".join(map(str, faults)) == spec
    assert parse(" kill: step=8 , domain=2, phase=backward ") == faults[:1]
    assert parse("") == parse("  ") == ()


def test_without_a_rank_every_rank_of_the_domain_is_meant() -> None:
    faults = parse("kill:domain=2,step=8,phase=mirror;kill:domain=2,step=9,phase=mirror,rank=1")
    assert matching(faults, "2", 0) == faults[:1]
    assert matching(faults, "2", 1) == faults
    assert matching(faults, "1", 1) == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kil:domain=1,step=1,phase=vote", "unknown action 'kil'.*did you mean 'kill'"),
        ("kill:domian=1,step=1,phase=vote", "unknown key 'domian'.*did you mean 'domain'"),
        ("kill:domain=1,step=1,phase=backwards", "'backwards'.*did you mean 'backward'"),
        ("kill:domain=1,step=1,phase=zzz", "unknown phase 'zzz'.*valid: before_step, forward"),
        ("kill:domain=1,step=1", "lacks phase"),
        ("kill:", "'' in 'kill:' is not key=value"),
        ("kill", "not ACTION:key=value"),
        ("kill:domain=1,step=0,phase=vote", "step must be a whole number from 1, got '0'"),
        ("kill:domain=1,step=1.5,phase=vote", "step must be a whole number"),
        ("kill:domain=1,step=1,phase=vote,rank=-1", "rank must be a whole number from 0"),
        ("kill:domain=1,step=1,step=2,phase=vote", "'step' occurs twice"),
        ("kill:domain=1,step=1,phase=", "'phase=' in .* is not key=value"),
        ("kill:domain=1,step=1,phase=vote;", "empty fault"),
        ("stop:domain=1,step=1,phase=vote", "lacks for"),
        ("restart:domain=1,step=1", "lacks phase, after"),
        ("slow:domain=1,step=1,phase=vote", "lacks factor"),
        ("kill:domain=1,step=1,phase=vote,for=1", "kill takes no 'for' in .*; it takes domain, st"),
        ("stop:domain=1,step=1,phase=vote,after=1", "stop takes no 'after'.*phase, rank, for"),
        ("slow:domain=1,step=1,phase=vote,factor=1", "factor must be a number greater than 1"),
        ("stop:domain=1,step=1,phase=vote,for=0", "for must be a number greater than 0, got '0'"),
        ("stop:domain=1,step=1,phase=vote,for=1e3", "for must be a number"),
        ("stop:domain=1,step=1,phase=vote,for=" + "9" * 400, "for must be a number"),
        ("hang:domain=1,step=1,phase=recover,for=1", "did you mean 'recovery'"),
        ("random:seed=1,mtbf_steps=2,actions=kill", "must be drawn first"),
    ],
)
def test_what_is_wrong_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


FAULTS = """
stop:domain=1,step=3,phase=forward,for=2.5
term:domain=0,step=4,phase=build
restart:domain=2,step=5,phase=join,rank=1,after=5
slow:domain=2,step=5,phase=before_step,factor=1.5
hang:domain=a.b,step=6,phase=checkpoint,for=0.0000001
partition:domain=1,step=7,phase=recovery,for=30
kill_lighthouse:domain=1,step=8,phase=after_commit
kill_lighthouse:domain=1,step=8,phase=after_commit,after=2
"""


def test_every_action_has_its_keys() -> None:
    lines = FAULTS.split()
    # A number is written without an exponent, whatever its size.
    assert [str(fault) for line in lines for fault in parse(line)] == lines
    assert parse(lines[0]) == (Fault("stop", "1", 3, "forward", None, 2.5),)
    assert parse(lines[3]) == (Fault("slow", "2", 5, "before_step", None, None, 1.5),)
    assert parse(lines[6])[0].seconds is None


@given(
    st.sampled_from(ACTIONS),
    st.integers(1, 1000),
    st.sampled_from(PHASES),
    st.none() | st.integers(0, 100),
    st.floats(0, 1e9, exclude_min=True),
    st.floats(1, 1e9, exclude_min=True),
)
def test_faults_round_trip(
    action: str, step: int, phase: str, rank: int | None, seconds: float, factor: float
) -> None:
    lasts = action not in ("kill", "term", "slow")
    slow = factor if action == "slow" else None
    fault = Fault(action, "d-1", step, phase, rank, seconds if lasts else None, slow)
    assert parse(str(fault)) == (fault,)


@given(
    st.integers(0, 1 << 40),
    st.integers(1, 6),
    st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4),
    st.floats(0.1, 20.0),
    st.integers(1, 4),
    st.integers(1, 20),
)
def test_drawn_schedules_can_be_borne(
    seed: int, count: int, actions: list[str], mtbf: float, copies: int, after: int
) -> None:
    spec = f"random:seed={seed},mtbf_steps={mtbf:f},actions={'+'.join(actions)}"
    spec += f",copies={copies},after={after}"
    domains = [f"d{i}" for i in range(count)]
    text = draw(spec, domains=domains, steps=60)
    assert text == draw(spec, domains=domains, steps=60)
    faults = parse(text)
    assert ";".join(map(str, faults)) == text
    assert [f.step for f in faults] == sorted(f.step for f in faults)
    back = dict.fromkeys(domains, 0.0)
    for step in range(1, 61):
        now = [f for f in faults if f.step == step]
        assert len(now) <= copies
        assert len({f.domain for f in now}) == len(now)
        assert len({f.phase for f in now}) <= 1
        for fault in now:
            assert fault.action in actions
            assert back[fault.domain] <= step
            if fault.action in ("kill", "term"):
                back[fault.domain] = math.inf
            elif fault.action not in ("slow", "kill_lighthouse"):
                assert fault.seconds == after
                back[fault.domain] = step + away_steps(after)
        assert any(there <= step for there in back.values())


def test_the_mean_of_the_steps_between_faults() -> None:
    spec = "random:seed=7,mtbf_steps=20,actions=slow"
    faults = parse(draw(spec, domains=["0"], steps=20_000))
    assert 900 < len(faults) < 1100
    assert len(parse(draw(spec, domains=["0"], steps=10))) <= 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random:seed=1,mtbf_steps=2", "lacks actions"),
        ("random:seed=1,mtbf_steps=0,actions=kill", "mtbf_steps must be a number greater than 0"),
        ("random:seed=1,mtbf_steps=2,actions=kill+stpo", "'stpo'.*did you mean 'stop'"),
        ("random:sed=1,mtbf_steps=2,actions=kill", "'sed'.*did you mean 'seed'"),
        (
            "random:seed=1,mtbf_steps=2,actions=kill,copies=0",
            "copies must be a whole number from 1",
        ),
        ("random:seed=1,mtbf_steps=2,actions=kill;kill:domain=1", "nothing beside it"),
        ("kill:domain=1,step=1,phase=vote", "only one 'random:...'"),
    ],
)
def test_what_is_wrong_with_a_random_one_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(spec, domains=["0", "1"], steps=10)
    assert is_random(spec) == spec.startswith("random")


def fired(fault: str, rank: int = 0, step: int | None = None) -> dict[str, object]:
    one = parse(fault)[0]
    at = one.step if step is None else step
    return {
        "action": one.action,
        "domain": one.domain,
        "phase": one.phase,
        "rank": rank,
        "step": at,
    }


def test_a_restarted_domain_does_not_meet_its_past() -> None:
    early = "kill:domain=1,step=2,phase=vote,rank=7"
    other = "kill:domain=0,step=2,phase=vote"
    restart = "restart:domain=1,step=4,phase=vote,after=1"
    later = "restart:domain=1,step=4,phase=optimizer,after=1"
    join = "restart:domain=1,step=3,phase=join,after=2"
    schedule = Schedule(parse(";".join([join, later, restart, other, early, join])))
    assert schedule.happened(fired(restart))
    assert not schedule.happened(fired(restart, rank=1))
    schedule.restarted(fired(restart))
    assert str(schedule) == ";".join([join, later, other, join])
    # While it joins it meets the first of two alike, and in its next life the second.
    assert schedule.happened(fired(join, step=9))
    schedule.restarted(fired(join, step=9))
    assert str(schedule) == ";".join([other, join])
    assert schedule.happened(fired(join, step=2))
    schedule.restarted(fired(join, step=2))
    assert str(schedule) == other


def test_a_fault_of_no_schedule_is_one_of_its_own() -> None:
    schedule = Schedule(())
    assert schedule.happened(fired("kill:domain=1,step=2,phase=vote"))
    assert str(schedule) == ""
