"""The training state that lies in one rank's memory: its own shard, and those it holds for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer.utils import init_optim_state

from .boxes import Box

SCALAR = Box((), ())


@dataclass(frozen=True)
class StepRecord:
    """What is to be said of one step, once it is committed."""

    step: int
    loss: float
    grad_norm: float
    samples: list[int]
    seconds: float


@dataclass
class Shard:
    """One owner's part of the state, by name: plain local tensors, and where they lie in the whole.

    Names are ``model.<fqn>`` and ``optimizer.<fqn>.<state>``. The tensors are the live ones, not
    copies: writing to them changes the model.
    """

    tensors: dict[str, torch.Tensor]
    boxes: dict[str, Box]

    @property
    def model_bytes(self) -> int:
        """Memory of the tensors that are not optimizer state."""
        return _bytes_of(t for n, t in self.tensors.items() if not n.startswith("optimizer."))


def box_of(tensor: torch.Tensor) -> Box:
    """Where the local part of ``tensor`` lies; all of it for a plain tensor."""
    if isinstance(tensor, DTensor):
        chunks = tensor.__create_chunk_list__()
        if len(chunks) == 1:
            return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of ``tensor``, sharing its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def optimizer_tensors(
    optimizers: list[torch.optim.Optimizer],
) -> dict[str, tuple[str, torch.Tensor]]:
    """``optimizer.<fqn>.<state>`` -> (fqn, tensor), for state that exists already."""
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for fqn, param in zip(group["param_names"], group["params"], strict=True):
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"optimizer.{fqn}.{name}"] = (fqn, value)
    return found


def create_optimizer_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make the state tensors that optimizers create in their first step, to be filled afterwards.

    A twin on plain local tensors takes an empty step, and its state is wrapped as the parameters
    are: a step on DTensors would first derive the sharding of every operator anew, which takes
    three times as long as all the rest of a restore.
    """
    for optimizer in optimizers:
        twin = like(
            optimizer,
            [[torch.nn.Parameter(local(p)) for p in g["params"]] for g in optimizer.param_groups],
        )
        init_optim_state(twin)
        for group, twins in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for param, plain in zip(group["params"], twins["params"], strict=True):
                for name, value in twin.state[plain].items():
                    if isinstance(param, DTensor) and value.shape == plain.shape and value.ndim:
                        value = DTensor.from_local(
                            value,
                            param.device_mesh,
                            param.placements,
                            run_check=False,
                            shape=param.shape,
                            stride=param.stride(),
                        )
                    optimizer.state[param][name] = value


def optimizer_state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of the local optimizer state, whether it exists yet or not."""
    total = 0
    for optimizer in optimizers:
        if optimizer.state:
            total += _bytes_of(
                local(v)
                for s in optimizer.state.values()
                for v in s.values()
                if isinstance(v, torch.Tensor)
            )
            continue
        groups = [
            {
                **group,
                "params": [
                    torch.nn.Parameter(torch.empty_like(local(p), device="meta"))
                    for p in group["params"]
                ],
                # Fused kernels want a real device.
                "fused": False,
                "foreach": False,
            }
            for group in optimizer.param_groups
        ]
        twin = _construct(optimizer, groups)
        init_optim_state(twin)
        total += _bytes_of(v for s in twin.state.values() for v in s.values())
    return total


def _bytes_of(values: Iterable[Any]) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def like(
    optimizer: torch.optim.Optimizer, params: Sequence[Sequence[torch.Tensor]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings for other parameters, given per group."""
    groups = [
        {**group, "params": list(others)}
        for group, others in zip(optimizer.param_groups, params, strict=True)
    ]
    return _construct(optimizer, groups)


def _construct(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    # The base class also wants defaults; every group brings all settings itself.
    cls: Any = type(optimizer)
    return cls(groups)


@dataclass
class Salvage:
    """The state of one generation, taken out of it; good until a later generation has committed."""

    generation: int
    shards: dict[int, Shard]
    """By the owner's index along the ft axis of that generation; the own one among them."""
    record: StepRecord | None
    """The last step prepared or committed."""
    apply: Callable[[], None] | None
    """Applies the prepared step to all ``shards``, without any message."""

    def settle(self, step: int, *, roll_forward: bool) -> None:
        """Bring the state to ``step``: the committed one, or the prepared one, which is then applied.

        The dead trainer is let go either way: what it had prepared beyond ``step`` is abandoned.
        """
        if roll_forward:
            assert self.apply is not None
            self.apply()
        elif self.record is not None and self.record.step > step:
            self.record = None
        self.apply = None
