"""The text of faults: strict, and helpful when it is wrong."""

import pytest

from torchtitan_ft.launch.chaos import Fault, matching, parse


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
    ],
)
def test_what_is_wrong_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)
