"""Makes torchtitan 0.3 train on CPU with gloo. On a machine with an accelerator it does nothing.

torchtitan resolves its device type once, when ``torchtitan.tools.utils`` is imported, and then
calls ``torch.<device type>`` as if it were ``torch.cuda``. So :func:`activate` must run before the
first torchtitan import. Each patch below was needed with torch 2.14 and torchtitan 0.3.0.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._utils

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _on_cpu() -> bool:
    return not torch.accelerator.is_available()


def _total_memory() -> int:
    return _PAGE * os.sysconf("SC_PHYS_PAGES")


def _rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * _PAGE


def _memory_stats(_device: Any = None) -> dict[str, int]:
    """What the metrics call device memory is, on CPU, the resident set of this process."""
    rss = _rss()
    stats: dict[str, int] = defaultdict(int)
    stats["active_bytes.all.peak"] = rss
    stats["reserved_bytes.all.peak"] = rss
    return stats


def activate() -> None:
    """Prepare this process for torchtitan: idempotent, a no-op where torch finds an accelerator.

    Raises:
        RuntimeError: if torchtitan was imported before, with another device type.
    """
    if not _on_cpu():
        return
    import sys

    loaded = sys.modules.get("torchtitan.tools.utils")
    if loaded is not None and loaded.device_type != "cpu":
        raise RuntimeError("torchtitan_ft.runtime.activate() must run before torchtitan's import")
    torch._utils._get_available_device_type = lambda: "cpu"
    name = platform.processor() or platform.machine()
    for attribute, shim in {
        "get_device_name": lambda _device=None: f"CPU {name}",
        "get_device_properties": lambda _device=None: SimpleNamespace(total_memory=_total_memory()),
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }.items():
        setattr(torch.cpu, attribute, shim)


def adapt_config(config: Trainer.Config) -> Trainer.Config:
    """Replace, in place, what cannot run on CPU: FlexAttention (no backward) and CUDA graphs."""
    if not _on_cpu():
        return config
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    config.training.disable_cuda_graphs = True
    if config.model_spec is not None:
        for _, _, parent, field in list(config.model_spec.model.traverse(FlexAttention.Config)):
            setattr(parent, field, ScaledDotProductAttention.Config())
    return config


def use_sum_reduction(model_parts: list[torch.nn.Module]) -> None:
    """gloo has no PREMUL_SUM, which FSDP2 picks for a divide factor; plain sums are exact here."""
    if not _on_cpu():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
