"""Moving state between two layouts: which piece comes from whom. Pure geometry; no torch here.

Every shard is a box in the coordinates of its full tensor, whatever parallelisms cut it (uneven
FSDP shards, TP + FSDP, expert shards). A rank *has* boxes and *needs* boxes; all ranks know all of
both, so every rank derives the same transfers and no request has to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: ``offset[d] <= i[d] < offset[d] + size[d]``."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has; 1 for a scalar."""
        count = 1
        for s in self.size:
            count *= s
        return count

    def __and__(self, other: Box) -> Box | None:
        """What both contain; None when that is nothing."""
        offset, size = [], []
        for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offset.append(low)
            size.append(high - low)
        return Box(tuple(offset), tuple(size))

    def minus(self, hole: Box) -> list[Box]:
        """The rest of this box without ``hole`` (which lies inside it), as disjoint boxes."""
        rest = []
        offset, size = list(self.offset), list(self.size)
        for d in range(len(size)):
            end, hole_end = offset[d] + size[d], hole.offset[d] + hole.size[d]
            if hole.offset[d] > offset[d]:
                part = list(size)
                part[d] = hole.offset[d] - offset[d]
                rest.append(Box(tuple(offset), tuple(part)))
            if hole_end < end:
                start, part = list(offset), list(size)
                start[d], part[d] = hole_end, end - hole_end
                rest.append(Box(tuple(start), tuple(part)))
            offset[d], size[d] = hole.offset[d], hole.size[d]
        return rest

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that stores ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offset, self.size, outer.offset, strict=True)
        )


@dataclass(frozen=True)
class Transfer:
    """One piece of one tensor: out of box ``have`` of rank ``source``, into box ``need`` of rank
    ``target``. ``have`` and ``need`` are indices into the lists the ranks published."""

    name: str
    piece: Box
    source: int
    have: int
    target: int
    need: int


class MissingShard(Exception):
    """Some part of a tensor is in nobody's memory."""


Boxes = Mapping[str, Sequence[Box]]
"""Tensor name -> boxes of it, in the order the rank stores them."""


def plan(haves: Sequence[Boxes], needs: Sequence[Boxes]) -> list[Transfer]:
    """The transfers that fill all needs; sources are local where possible, else spread by load.

    Args:
        haves: per rank, what it can give.
        needs: per rank, what it must get.

    Raises:
        MissingShard: if nobody has some needed part.
    """
    sources: dict[str, list[tuple[int, int, Box]]] = {}
    for rank, given in enumerate(haves):
        for name, boxes in given.items():
            for i, box in enumerate(boxes):
                if box.elements:
                    sources.setdefault(name, []).append((rank, i, box))
    load = [0] * len(haves)
    transfers = []
    for target, needed in enumerate(needs):
        for name, wanted in needed.items():
            for need, box in enumerate(wanted):
                left = [box] if box.elements else []
                # Own memory first, then whoever has given least so far.
                order = sorted(
                    sources.get(name, ()), key=lambda s: (s[0] != target, load[s[0]], s[0], s[1])
                )
                for source, have, stored in order:
                    rest: list[Box] = []
                    for part in left:
                        piece = part & stored
                        if piece is None:
                            rest.append(part)
                            continue
                        transfers.append(Transfer(name, piece, source, have, target, need))
                        if source != target:
                            load[source] += piece.elements
                        rest.extend(part.minus(piece))
                    left = rest
                    if not left:
                        break
                if left:
                    raise MissingShard(f"no live domain has {name} at {left[0]}")
    return transfers
