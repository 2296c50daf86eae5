import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ft.recovery.boxes import Box, MissingShard, plan


def shards(rows: int, columns: int, world: int) -> list[Box]:
    """FSDP's uneven row shards: ceil-sized chunks, the last ones short or empty."""
    chunk = -(-rows // world)
    starts = [min(rows, r * chunk) for r in range(world + 1)]
    return [Box((starts[r], 0), (starts[r + 1] - starts[r], columns)) for r in range(world)]


def tiles(rows: int, columns: int, fsdp: int, tp: int) -> list[Box]:
    """TP on columns, FSDP on rows."""
    wide = shards(columns, 1, tp)
    return [
        Box((r.offset[0], c.offset[0]), (r.size[0], c.size[0]))
        for r in shards(rows, columns, fsdp)
        for c in wide
    ]


def boxes_in(rows: int, columns: int):
    return st.integers(0, rows - 1).flatmap(
        lambda r: st.integers(0, columns - 1).flatmap(
            lambda c: st.tuples(st.integers(1, rows - r), st.integers(1, columns - c)).map(
                lambda s: Box((r, c), s)
            )
        )
    )


@given(boxes_in(7, 9), boxes_in(7, 9))
def test_intersection_and_rest_tile_the_box(a: Box, b: Box) -> None:
    covered = np.zeros((7, 9), dtype=int)
    common = a & b
    parts = [a] if common is None else [common, *a.minus(common)]
    whole = Box((0, 0), (7, 9))
    for part in parts:
        covered[part.within(whole)] += 1
    expected = np.zeros((7, 9), dtype=int)
    expected[a.within(whole)] = 1
    assert (covered == expected).all()


@given(
    rows=st.integers(1, 17),
    columns=st.integers(1, 5),
    old=st.integers(1, 5),
    new=st.integers(1, 5),
    dead=st.integers(0, 4),
    tp=st.sampled_from([1, 2]),
)
def test_reshard_is_exact(rows: int, columns: int, old: int, new: int, dead: int, tp: int) -> None:
    """From any layout with one copy of each shard, less a dead rank, to any other."""
    dead %= old
    full = np.arange(rows * columns).reshape(rows, columns)
    whole = Box((0, 0), (rows, columns))
    owned = shards(rows, columns, old)
    have = [[owned[r], owned[(r - 1) % old]] if old > 1 else [owned[r]] for r in range(old)]
    live = [r for r in range(old) if r != dead or old == 1]
    wanted = tiles(rows, columns, new, tp)
    world = max(len(live), len(wanted))
    haves = [{"w": have[live[i]]} if i < len(live) else {} for i in range(world)]
    needs = [{"w": [wanted[i]]} if i < len(wanted) else {} for i in range(world)]
    stores = [[full[b.within(whole)] for b in h.get("w", [])] for h in haves]
    results = [[np.full(b.size, -1) for b in n.get("w", [])] for n in needs]
    for t in plan(haves, needs):
        piece = stores[t.source][t.have][t.piece.within(haves[t.source]["w"][t.have])]
        target = results[t.target][t.need]
        index = t.piece.within(needs[t.target]["w"][t.need])
        assert (target[index] == -1).all(), "written twice"
        target[index] = piece
    for need, result in zip(needs, results, strict=True):
        for box, array in zip(need.get("w", []), result, strict=True):
            assert (array == full[box.within(whole)]).all()


def test_own_memory_first_and_load_is_spread() -> None:
    whole = Box((0,), (8,))
    halves = [Box((0,), (4,)), Box((4,), (4,))]
    transfers = plan([{"w": [whole]}, {"w": [whole]}, {}], [{"w": [halves[0]]}, {}, {"w": halves}])
    assert [(t.source, t.target) for t in transfers if t.target == 0] == [(0, 0)]
    assert {t.source for t in transfers if t.target == 2} == {0, 1}


def test_scalars_move_too() -> None:
    scalar = Box((), ())
    (transfer,) = plan([{"step": [scalar]}, {}], [{}, {"step": [scalar]}])
    assert (transfer.source, transfer.target, transfer.piece) == (0, 1, scalar)


def test_what_nobody_has_is_named() -> None:
    with pytest.raises(MissingShard, match=r"model\.w"):
        plan([{"model.w": [Box((0,), (4,))]}], [{"model.w": [Box((2,), (4,))]}])
