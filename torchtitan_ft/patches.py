"""What is patched in torchtitan 0.3.0, and why. Nothing else in this project replaces its code."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.distributed import utils

_original = utils.clip_grad_norm_
_last: torch.Tensor | None = None


def _clip_and_remember(*args: Any, **kwargs: Any) -> torch.Tensor:
    global _last
    _last = _original(*args, **kwargs)
    return _last


def last_grad_norm() -> torch.Tensor:
    """Norm of the last gradient clipped, over all ranks.

    ``Trainer.train_step`` keeps it in a local variable and gives it only to the metrics, and only
    on steps that are logged; the event of every step has it.
    """
    assert _last is not None, "no gradient was clipped yet"
    return _last


utils.clip_grad_norm_ = _clip_and_remember
