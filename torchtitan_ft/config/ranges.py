"""Ranges torchtitan does not check itself, and that would break later with a less clear word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ConfigError

_positive: tuple[Callable[[Any], bool], str] = (lambda v: v >= 1, "at least 1")
_not_negative: tuple[Callable[[Any], bool], str] = (lambda v: v >= 0, "at least 0")
_above_zero: tuple[Callable[[Any], bool], str] = (lambda v: v > 0, "above 0")
_fraction: tuple[Callable[[Any], bool], str] = (lambda v: v is None or 0 <= v <= 1, "in [0, 1]")
_positive_or_rest: tuple[Callable[[Any], bool], str] = (
    lambda v: v == -1 or v >= 1,
    "-1 or at least 1",
)

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "training.steps": _not_negative,
    "training.seq_len": _positive,
    "training.local_batch_size": _positive,
    "training.global_batch_size": _positive_or_rest,
    "training.max_norm": _above_zero,
    "training.gc_freq": _positive,
    "metrics.log_freq": _positive,
    "parallelism.data_parallel_replicate_degree": _positive,
    "parallelism.data_parallel_shard_degree": _positive_or_rest,
    "parallelism.tensor_parallel_degree": _positive,
    "parallelism.pipeline_parallel_degree": _positive,
    "parallelism.context_parallel_degree": _positive,
    "parallelism.expert_parallel_degree": _positive,
    "lr_scheduler.warmup_steps": _not_negative,
    "lr_scheduler.decay_ratio": _fraction,
    "lr_scheduler.min_lr_factor": _fraction,
    "comm.init_timeout_seconds": _positive,
    "comm.train_timeout_seconds": _positive,
    "profiler.profile_freq": _positive,
    "validator.freq": _positive,
}


def check_ranges(config: Any, sources: dict[str, str]) -> None:
    """Raise :class:`ConfigError` for the first value out of range, naming where it was set."""
    for path, (accept, text) in RANGES.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name)
        if not accept(value):
            raise ConfigError(
                f"{sources.get(path, 'registry')}: {path!r} must be {text}, got {value}"
            )
    for i, group in enumerate(config.optimizer.param_groups):
        for key in ("lr", "weight_decay", "eps"):
            number = group.optimizer_kwargs.get(key, 0)
            if not isinstance(number, int | float) or number < 0:
                where = sources.get("optimizer.param_groups", "registry")
                raise ConfigError(
                    f"{where}: 'optimizer.{key}' (group {i}) must be a number of at least 0, "
                    f"got {number!r}"
                )
