import json
from dataclasses import asdict, replace

import pytest

from torchtitan_ft.membership import World, global_rank

WORLD = World(
    generation=3,
    domains=("0", "2", "10"),
    ft_index=1,
    local_rank=1,
    ranks_per_domain=4,
    outer=1,
    store_address="127.0.0.1:1",
    reports=([[]], [[]], [[]]),
)


def test_ranks_are_a_permutation_for_any_split() -> None:
    for outer in (1, 2, 4):
        ranks = {global_rank(d, r, 3, 4, outer) for d in range(3) for r in range(4)}
        assert ranks == set(range(12))


def test_domain_is_contiguous_without_pipeline() -> None:
    assert [global_rank(1, r, 3, 4, 1) for r in range(4)] == [4, 5, 6, 7]


def test_pipeline_stages_stay_outermost() -> None:
    # 2 stages of 2 ranks: stage 0 of all domains comes before stage 1 of any.
    assert [global_rank(0, r, 3, 4, 2) for r in range(4)] == [0, 1, 6, 7]
    assert [global_rank(2, r, 3, 4, 2) for r in range(4)] == [4, 5, 10, 11]


def test_uneven_split_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        global_rank(0, 0, 2, 3, 2)


def test_wire_gives_the_same_world_to_the_other_ranks_of_the_domain() -> None:
    wire = json.loads(json.dumps(asdict(WORLD)))
    assert World.from_json(wire, local_rank=3) == replace(WORLD, local_rank=3)
    assert (WORLD.rank, WORLD.ranks, WORLD.domain) == (5, 12, "2")
