"""Initial weights as a function of the seed alone.

DTensor's random operators keep no common stream on CPU: the same seed gives other weights for
another world size. So every parameter is drawn whole, from a generator seeded by (seed, name), and
each rank keeps its part. It costs every rank the drawing of one full parameter at a time, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols import BaseModel
from torchtitan.protocols.module import Module


class _SeededInit:
    def __init__(self, init: Callable[[torch.Tensor], object], seed: int, name: str) -> None:
        self._init = init
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._seed = int.from_bytes(digest[:8], "little") >> 1

    @torch.no_grad()
    def __call__(self, param: torch.Tensor) -> None:
        devices = [param.device] if param.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed)
            if not isinstance(param, DTensor):
                self._init(param)
                return
            whole = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            self._init(whole)
            # src_data_rank=None: every rank has the same data, nothing is sent.
            mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(mine.to_local())


def _leave_alone(_param: torch.Tensor) -> None:
    """For weights that come from peers or a file anyway."""


def set_initializers(model: BaseModel.Config, *, seed: int, restoring: bool) -> None:
    """Make ``model`` (a config tree, changed in place) draw its weights from ``seed`` alone.

    With ``restoring`` nothing is drawn: the caller fills every parameter afterwards.
    """
    for fqn, config, _, _ in list(model.traverse(Module.Config, recurse=True)):
        assert isinstance(config, Module.Config)
        if config.param_init is not None:
            config.param_init = {
                name: _leave_alone if restoring else _SeededInit(init, seed, f"{fqn}.{name}")
                for name, init in config.param_init.items()
            }
