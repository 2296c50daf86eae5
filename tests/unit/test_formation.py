"""Which proposals make a world: never two side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.membership import World
from torchtitan_ft.membership.formation import Candidate, Formation, Formed, Wait, choose

IDS = ("a", "b", "c", "d")


def candidate(name: str, **values: Any) -> Candidate:
    return Candidate(
        id=name, domain=name, ranks=1, store_address=f"{name}:1", address=f"{name}:2", **values
    )


def member(name: str, *, of: tuple[str, ...] = IDS, witness: int = 5, **values: Any) -> Candidate:
    values = {"attempted": 3, "formed": Formed(3, of, witness), "consented": witness, **values}
    return candidate(name, **values)


def world(choice: World | Wait) -> World:
    assert isinstance(choice, World), choice
    return choice


def test_the_first_generation_waits_for_all_domains() -> None:
    two = [candidate("a"), candidate("b")]
    assert choose(1, two, domains=3) == Wait("3 domains, 2 here")
    first = world(choose(2, [*two, candidate("c")], domains=3))
    assert (first.generation, first.domains, first.newcomers) == (1, ("a", "b", "c"), ())
    # Once all were there, a death before the first step does not make the others wait.
    again = [replace(c, attempted=1) for c in two]
    assert world(choose(3, again, domains=3)).generation == 2


def test_a_majority_goes_on_whatever_the_witness_has_forgotten() -> None:
    after = world(choose(1, [member("a"), member("b"), member("c")], domains=4))
    assert (after.generation, after.domains) == (4, ("a", "b", "c"))


def test_a_minority_needs_a_witness_that_has_seen_everything() -> None:
    pair = [member("a"), member("b")]
    assert world(choose(6, pair, domains=4)).domains == ("a", "b")  # one change: the deaths
    assert isinstance(choose(7, pair, domains=4), Wait)  # two: something may have been formed
    assert isinstance(choose(5, pair, domains=4), Wait)  # none, though domains are gone: restarted
    assert isinstance(choose(1, pair, domains=4), Wait)
    asked_since = [replace(c, consented=6) for c in pair]
    assert world(choose(7, asked_since, domains=4)).generation == 4
    assert world(choose(1, pair, domains=4, arbiter=True)).generation == 4


def test_who_was_not_in_the_newest_generation_is_a_newcomer_whatever_it_holds() -> None:
    slept = member("d", reports=("stale",))
    going = [
        member(
            n, of=("a", "b", "c"), reports=(n,), formed=Formed(4, ("a", "b", "c"), 6), attempted=4
        )
        for n in ("a", "b", "c")
    ]
    after = world(choose(7, [*going, slept], domains=4))
    assert after.newcomers == ("d",)
    assert after.reports == (("a",), ("b",), ("c",), ())
    assert after.generation == 5


def test_a_member_that_missed_the_last_word_is_no_newcomer() -> None:
    # "c" acknowledged generation 4 but did not see that all had.
    formed = Formed(4, ("a", "b", "c"), 6)
    late = member("c", reports=("c",), attempted=4)
    others = [member(n, formed=formed, reports=(n,), attempted=4) for n in ("a", "b")]
    assert world(choose(7, [*others, late], domains=4)).newcomers == ()


def test_who_cannot_be_reached_is_left_out_if_a_majority_remains() -> None:
    three = [member(n, unreachable=("d",)) for n in ("a", "b", "c")]
    cut = member("d", unreachable=("a",))
    after = world(choose(6, [*three, cut], domains=4))
    assert after.domains == ("a", "b", "c")
    # Two against two: the witness hears them all, so nobody goes on.
    halves = [member(n, unreachable=("c", "d")) for n in ("a", "b")]
    halves += [member(n, unreachable=("a", "b")) for n in ("c", "d")]
    assert isinstance(choose(6, halves, domains=4), Wait)


def test_leaving_domains_count_but_do_not_come_along() -> None:
    pair = [member("a"), member("b", leaving=True), member("c", leaving=True)]
    after = world(choose(6, pair, domains=4))
    assert after.domains == ("a",)


def test_min_domains_holds_until_someone_gives_up() -> None:
    pair = [member("a", of=("a", "b")), member("b", of=("a", "b"))]
    waits = choose(6, pair, domains=4, min_domains=3)
    assert isinstance(waits, Wait)
    assert waits.for_domains
    given_up = [replace(pair[0], giving_up=True), pair[1]]
    assert world(choose(6, given_up, domains=4, min_domains=3)).giving_up


def test_a_second_process_of_a_domain() -> None:
    twin = replace(candidate("a"), id="a2")
    assert isinstance(choose(1, [candidate("a"), twin, candidate("b")], domains=2), Wait)
    going = [member("a", of=("a", "b")), member("b", of=("a", "b"))]
    assert world(choose(6, [*going, twin], domains=2)).ids == ("a", "b")


def test_another_size_is_not_let_in() -> None:
    going = [member("a", of=("a", "b")), member("b", of=("a", "b"))]
    assert world(choose(6, [*going, replace(candidate("z"), ranks=2)], domains=2)).ids == ("a", "b")


def test_over_the_wire_and_the_state_machine() -> None:
    me = Formation(candidate("a"), domains=2)
    other = candidate("b")
    mine = me.candidate(["r"])
    assert Candidate.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    first = me.consider(1, [mine, other])
    assert isinstance(first, World)
    assert not me.acknowledged(first, {"b"})
    assert me.candidate([]).unreachable == ("b",)
    second = me.consider(1, [me.candidate([]), other])
    # What one could not reach is left out, and with it the run's first generation has begun.
    assert isinstance(second, World)
    assert second.generation == 2
    assert me.acknowledged(second, ())
    assert me.formed == Formed(2, second.ids, 1)
    member_again = me.candidate([])
    back = Candidate.from_json(json.loads(json.dumps(member_again.to_json())))
    assert back == member_again


@given(st.sets(st.sampled_from(IDS)), st.sets(st.sampled_from(IDS)), st.booleans(), st.booleans())
def test_two_sides_never_both_go_on(
    one: set[str], two: set[str], sees_one: bool, sees_two: bool
) -> None:
    """Whatever way the last generation falls into two groups, and whichever the witness hears."""
    two -= one
    sides = []
    heard = 6
    for side, sees in ((one, sees_one), (two, sees_two)):
        if not sees or not side:
            continue
        # They ask one after the other; each time the answer changes.
        choice = choose(heard, [member(n) for n in side], domains=4)
        heard += 1
        sides.append(isinstance(choice, World))
    assert sum(sides) <= 1
