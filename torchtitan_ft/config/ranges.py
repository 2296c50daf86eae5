"""Ranges torchtitan does not check itself, and that would break later with a less clear word."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from .errors import ConfigError, nearest
from .fields import Sources, source_of

# Written so that nan fails them all.
_positive: tuple[Callable[[Any], bool], str] = (lambda v: v >= 1, "at least 1")
_not_negative: tuple[Callable[[Any], bool], str] = (lambda v: v >= 0, "at least 0")
_above_zero: tuple[Callable[[Any], bool], str] = (lambda v: v > 0, "above 0")
_fraction: tuple[Callable[[Any], bool], str] = (lambda v: 0 <= v <= 1, "in [0, 1]")
_positive_or_rest: tuple[Callable[[Any], bool], str] = (
    lambda v: v == -1 or v >= 1,
    "-1 or at least 1",
)
_step_or_last: tuple[Callable[[Any], bool], str] = (lambda v: v >= -1, "-1 or at least 0")

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
    "parallelism.pipeline_parallel_microbatch_size": _positive,
    "parallelism.pipeline_parallel_layers_per_stage": _positive,
    "parallelism.pipeline_parallel_first_stage_less_layers": _not_negative,
    "parallelism.pipeline_parallel_last_stage_less_layers": _not_negative,
    "parallelism.context_parallel_degree": _positive,
    "parallelism.expert_parallel_degree": _positive,
    "lr_scheduler.warmup_steps": _not_negative,
    "lr_scheduler.total_steps": _positive,
    "lr_scheduler.decay_ratio": _fraction,
    "lr_scheduler.min_lr_factor": _fraction,
    "activation_checkpoint.memory_budget": _fraction,
    "checkpoint.load_step": _step_or_last,
    "comm.init_timeout_seconds": _positive,
    "comm.train_timeout_seconds": _positive,
    "comm.trace_buf_size": _not_negative,
    "profiler.profile_freq": _positive,
    "profiler.profiler_active": _positive,
    "profiler.profiler_warmup": _not_negative,
    "validator.freq": _positive,
    "loss.num_chunks": _positive,
}
"""Path -> check and its words. Fields that are None, or that a subclass lacks, are not checked."""


def check_ranges(config: Any, sources: Sources) -> None:
    """Raise :class:`ConfigError` for the first value out of range, naming where it was set."""
    for path, (accept, text) in RANGES.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None and not accept(value):
            raise _error(path, f"must be {text}, got {value}", sources)
    _check_schedule(config, sources)
    groups = config.optimizer.param_groups
    for i, group in enumerate(groups):
        _check_group(config, group, f"optimizer.param_groups.{i}", len(groups) == 1, sources)


def _error(path: str, text: str, sources: Sources) -> ConfigError:
    return ConfigError(f"{source_of(path, sources)}: {path!r} {text}")


def _check_schedule(config: Any, sources: Sources) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    name = config.parallelism.pipeline_parallel_schedule
    try:
        get_schedule_class(name)
    except ValueError as error:  # it lists the valid ones
        path = "parallelism.pipeline_parallel_schedule"
        raise _error(path, f"{name!r} is unknown: {error}", sources) from error


def _check_group(config: Any, group: Any, path: str, only: bool, sources: Sources) -> None:
    """One ``[[optimizer.param_groups]]``: its optimizer, and that one's arguments."""
    from torchtitan.components.optimizer import OptimizersContainer

    def error(key: str, text: str) -> ConfigError:
        if only:  # it has short names too, which the file may have used
            short = "name" if key == "optimizer_name" else key.rpartition(".")[2]
            where = source_of(f"{path}.{key}", sources)
            return ConfigError(f"{where}: 'optimizer.{short}' ({path}.{key}) {text}")
        return _error(f"{path}.{key}", text, sources)

    name = group.optimizer_name
    try:
        re.compile(group.pattern)
    except re.error as problem:
        text = f"{group.pattern!r} is no regular expression: {problem}"
        raise _error(f"{path}.pattern", text, sources) from problem
    owner = getattr(type(config.optimizer), "_owner", None) or OptimizersContainer
    try:
        factory = owner._resolve_optimizer_factory(name)
    except NotImplementedError as problem:
        near = nearest(name, ["Adam", "AdamW", "DistMuon"])
        raise error("optimizer_name", f"{name!r} is unknown{near}") from problem
    parameters = inspect.signature(factory).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for argument, value in group.optimizer_kwargs.items():
        key = f"optimizer_kwargs.{argument}"
        if argument not in parameters and not loose:
            near = nearest(argument, [p for p in parameters if p != "params"])
            raise error(key, f"is no argument of {name}{near}")
        if argument in ("lr", "weight_decay", "eps") and not _is_number(value, 0, math.inf):
            raise error(key, f"must be a number of at least 0, got {value!r}")
        if argument == "betas" and not (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(_is_number(v, 0, 1) for v in value)
        ):
            raise error(key, f"must be two numbers in [0, 1), got {value!r}")


def _is_number(value: Any, low: float, below: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < below
