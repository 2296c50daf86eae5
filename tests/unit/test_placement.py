import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.redundancy.placement import (
    copies_for,
    holders_of,
    lost_owners,
    owners_held_by,
)


@pytest.mark.parametrize(
    ("overlap", "domains", "copies"),
    [
        (0.0, 8, 0),
        (0.125, 8, 1),
        (0.25, 8, 2),
        (0.25, 4, 1),
        (0.25, 3, 1),
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001 in binary
        (0.29, 100, 29),
        (0.05, 64, 4),
        (1.0, 8, 7),
        (0.5, 1, 0),
        (1e-9, 4, 1),
    ],
)
def test_copies(overlap: float, domains: int, copies: int) -> None:
    assert copies_for(overlap, domains) == copies


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@given(sizes)
def test_holders_and_owners_are_two_views_of_one_relation(size: tuple[int, int]) -> None:
    n, copies = size
    for owner in range(n):
        holders = holders_of(owner, n, copies)
        assert len(set(holders)) == copies
        assert owner not in holders
        for holder in range(n):
            assert (holder in holders) == (owner in owners_held_by(holder, n, copies))
    # and everybody carries the same load
    assert {len(owners_held_by(h, n, copies)) for h in range(n)} == {copies}


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_any_deaths_up_to_copies_lose_nothing(size: tuple[int, int]) -> None:
    n, copies = size
    for dead in itertools.combinations(range(n), copies):
        assert lost_owners(set(range(n)) - set(dead), n, copies) == []


def test_neighbours_beyond_copies_are_lost() -> None:
    assert lost_owners({0, 3}, 4, 1) == [1]
    assert lost_owners({0, 2}, 4, 1) == []
    assert lost_owners({1, 2, 3}, 4, 0) == [0]
