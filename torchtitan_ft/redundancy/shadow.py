"""Shadows: copies of other domains' shards, kept current by applying the same update.

A holder receives the owner's reduced, clipped gradient and runs the same optimizer on it: same
inputs, same shapes, same code, so owner and shadow are equal bit for bit. That costs the network
one gradient per copy and step, a third of what sending Adam's state would (Checkmate, arXiv
2507.13522).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..recovery.boxes import Box
from ..recovery.state import Shard, like, local, optimizer_tensors

_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], implementation: str) -> None:
    """Refuse what shadows cannot follow: an optimizer whose update of one element depends on
    others, and torchtitan's bf16 state, which is made by a hook that only its own optimizers have.

    Raises:
        ValueError: naming it.
    """
    if implementation == "fused_opt_states_bf16":
        raise ValueError(
            "shadows cannot follow optimizer.implementation = 'fused_opt_states_bf16': "
            "use 'fused', or set fault_tolerance.overlap = 0.0"
        )
    for optimizer in optimizers:
        if type(optimizer) not in _ELEMENTWISE:
            raise ValueError(
                f"shadows need an elementwise optimizer (Adam, AdamW, SGD), and "
                f"{type(optimizer).__name__} is not one: set fault_tolerance.overlap = 0.0"
            )


class FlatGradients:
    """One buffer for the gradients of one shard, so that a step's mirror is a single message.

    Args:
        params: local parameters, in the order of the messages; owner and holder must agree on it.

    Raises:
        ValueError: if they differ in dtype.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        dtypes = {p.dtype for p in params}
        if len(dtypes) > 1:
            raise ValueError(
                f"shadows need parameters of one dtype, got {sorted(map(str, dtypes))}"
            )
        first = params[0]
        self.buffer = torch.zeros(
            sum(p.numel() for p in params), dtype=first.dtype, device=first.device
        )
        sizes = [p.numel() for p in params]
        self.views = [
            part.view(p.shape) for part, p in zip(self.buffer.split(sizes), params, strict=True)
        ]


class Shadow:
    """The copy of one owner's shard on this rank: parameters, optimizer state and gradients.

    Args:
        owner: the owner's index along the ft axis.
        boxes: ``model.<fqn>`` -> where the owner's local parameters lie.
        template: this rank's own optimizers; the shadow's have the same classes and groups.
        params: this rank's own parameters by fqn, for dtype and device.
    """

    def __init__(
        self,
        owner: int,
        boxes: Mapping[str, Box],
        template: Sequence[torch.optim.Optimizer],
        params: Mapping[str, nn.Parameter],
    ) -> None:
        self.owner = owner
        self.params = {
            fqn: nn.Parameter(
                torch.zeros(boxes[f"model.{fqn}"].size, dtype=p.dtype, device=local(p).device),
                requires_grad=p.requires_grad,
            )
            for fqn, p in params.items()
        }
        self._boxes = dict(boxes)
        self._template = list(template)
        self.optimizers = [
            like(o, [[self.params[fqn] for fqn in g["param_names"]] for g in o.param_groups])
            for o in template
        ]
        self.gradients = FlatGradients([p for p in self.params.values() if p.requires_grad])

    def shard(self) -> Shard:
        """The live state of the shadow."""
        tensors = {f"model.{fqn}": p.detach() for fqn, p in self.params.items()}
        boxes = {name: self._boxes[name] for name in tensors}
        for name, (fqn, tensor) in optimizer_tensors(self.optimizers).items():
            tensors[name] = tensor
            whole = tensor.shape == self.params[fqn].shape and tensor.ndim > 0
            boxes[name] = boxes[f"model.{fqn}"] if whole else Box((), ())
        return Shard(tensors, boxes)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the received gradients, with the hyperparameters the owner has at this step."""
        trainable = [p for p in self.params.values() if p.requires_grad]
        for param, gradient in zip(trainable, self.gradients.views, strict=True):
            param.grad = gradient
        for mine, own in zip(self.optimizers, self._template, strict=True):
            for group, source in zip(mine.param_groups, own.param_groups, strict=True):
                group["lr"] = source["lr"]
            mine.step()


class Mirror:
    """Sends this rank's gradients to its holders and receives those of the owners it shadows.

    Args:
        params: this rank's own parameters (DTensors), by fqn.
        shadows: the shadows this rank keeps.
        send_to: global ranks of the holders of this rank's shard.
        receive_from: global ranks of the owners, in the order of ``shadows``.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        shadows: Sequence[Shadow],
        send_to: Sequence[int],
        receive_from: Sequence[int],
    ) -> None:
        self._params = [p for p in params.values() if p.requires_grad]
        self._own = FlatGradients([local(p) for p in self._params])
        self._shadows = shadows
        self._send_to = send_to
        self._receive_from = receive_from

    @torch.no_grad()
    def start(self) -> list[dist.Work]:
        """Put this step's gradients on the way; the shadows have theirs when all work is done."""
        for view, param in zip(self._own.views, self._params, strict=True):
            if param.grad is not None:
                view.copy_(local(param.grad))
            elif view.numel():
                # The owner's optimizer would skip it, the holder's would not.
                raise ValueError("shadows need a gradient for every trainable parameter")
        operations = [
            dist.P2POp(dist.irecv, shadow.gradients.buffer, rank)
            for shadow, rank in zip(self._shadows, self._receive_from, strict=True)
            if shadow.gradients.buffer.numel()
        ]
        if self._own.buffer.numel():
            operations += [dist.P2POp(dist.isend, self._own.buffer, r) for r in self._send_to]
        return dist.batch_isend_irecv(operations) if operations else []
