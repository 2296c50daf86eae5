"""Filling shards from the memory of all live ranks: one mechanism for recovery, and for shadows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .boxes import Box, Transfer, plan
from .state import Shard

_ROUND_BYTES = 256 << 20
"""Bytes per rank and round: bounds the send and receive buffers."""


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """``value`` of every rank, by rank. JSON, so that nothing from the network is unpickled."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [
        json.loads(t[: int(s)].cpu().numpy().tobytes()) for t, s in zip(texts, sizes, strict=True)
    ]


Published = dict[str, list[tuple[list[int], list[int]]]]


def publish(shards: Sequence[Shard]) -> Published:
    """Boxes of ``shards`` by name, as JSON types, in the order of ``shards``."""
    found: Published = {}
    for shard in shards:
        for name, box in shard.boxes.items():
            found.setdefault(name, []).append((list(box.offset), list(box.size)))
    return found


def _boxes(published: Published) -> dict[str, list[Box]]:
    return {
        name: [Box(tuple(offset), tuple(size)) for offset, size in boxes]
        for name, boxes in published.items()
    }


def exchange(
    have: Sequence[Shard],
    need: Sequence[Shard],
    haves: Sequence[Published],
    needs: Sequence[Published],
    device: torch.device,
) -> int:
    """Fill ``need`` from what all ranks have. Collective over the default group.

    Args:
        have: shards of this rank to read, as published in ``haves[rank]``.
        need: shards of this rank to write, as published in ``needs[rank]``.
        haves: by rank.
        needs: by rank.
        device: where the group communicates.

    Returns:
        Bytes received from other ranks.

    Raises:
        MissingShard: if some needed part is in nobody's memory.
    """
    me = dist.get_rank()
    reads, writes = _by_name(have), _by_name(need)
    received = 0
    pending: list[Transfer] = []
    moved = 0
    transfers = plan([_boxes(h) for h in haves], [_boxes(n) for n in needs])
    limit = _ROUND_BYTES * dist.get_world_size()
    for transfer in transfers:
        if transfer.source == transfer.target:
            if transfer.target == me:
                _target(writes, transfer).copy_(_source(reads, transfer))
            continue
        pending.append(transfer)
        # Every rank cuts the rounds at the same place: by all bytes moved, not only its own. The
        # element size is not known to all; 8 bytes is the largest there is.
        moved += transfer.piece.elements * 8
        if moved >= limit:
            received += _round(pending, reads, writes, device)
            pending, moved = [], 0
    # Every rank has the same plan, so either all take part in this round or none does.
    if pending:
        received += _round(pending, reads, writes, device)
    return received


def _round(
    transfers: list[Transfer],
    reads: dict[str, list[tuple[torch.Tensor, Box]]],
    writes: dict[str, list[tuple[torch.Tensor, Box]]],
    device: torch.device,
) -> int:
    me, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(world)]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for transfer in transfers:
        if transfer.source == me:
            outgoing[transfer.target].append(_source(reads, transfer))
        if transfer.target == me:
            incoming[transfer.source].append(_target(writes, transfer))
    out_sizes = [sum(t.numel() * t.element_size() for t in ts) for ts in outgoing]
    in_sizes = [sum(t.numel() * t.element_size() for t in ts) for ts in incoming]
    parts = [_bytes(t) for ts in outgoing for t in ts]
    send = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    receive = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(receive, send.to(device), in_sizes, out_sizes)
    at = 0
    for targets in incoming:
        for target in targets:
            size = target.numel() * target.element_size()
            piece = receive[at : at + size].clone().view(target.dtype).view(target.shape)
            target.copy_(piece)
            at += size
    return at


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _by_name(shards: Sequence[Shard]) -> dict[str, list[tuple[torch.Tensor, Box]]]:
    found: dict[str, list[tuple[torch.Tensor, Box]]] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            found.setdefault(name, []).append((tensor, shard.boxes[name]))
    return found


def _source(reads: dict[str, list[tuple[torch.Tensor, Box]]], transfer: Transfer) -> torch.Tensor:
    tensor, box = reads[transfer.name][transfer.have]
    return tensor[transfer.piece.within(box)]


def _target(writes: dict[str, list[tuple[torch.Tensor, Box]]], transfer: Transfer) -> torch.Tensor:
    tensor, box = writes[transfer.name][transfer.need]
    return tensor[transfer.piece.within(box)]
