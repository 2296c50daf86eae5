"""The two tables that are more than field paths: ``[activation_checkpoint]`` and ``[optimizer]``."""

from __future__ import annotations

import dataclasses
from typing import Any

from .errors import ConfigError, nearest
from .fields import Sources, record

_MODES = {"selective": "SelectiveAC", "full": "FullAC", "memory_budget": "MemoryBudgetAC"}

_SHORT = ("name", "lr", "beta1", "beta2", "eps", "weight_decay")


def choose_activation_checkpoint(
    config: Any, tables: dict[str, Any], file: str, sources: Sources
) -> None:
    """Take ``mode`` out of its table and put torchtitan's class for it into ``config``.

    What is left of the table are fields of that class.

    Raises:
        ConfigError: unknown mode, or keys without one.
    """
    from torchtitan.distributed import activation_checkpoint as kinds

    table = tables.get("activation_checkpoint")
    if not isinstance(table, dict):
        if table is not None:
            raise ConfigError(f"{file}: 'activation_checkpoint' is a table, got {table!r}")
        return
    table = dict(table)
    tables["activation_checkpoint"] = table
    if "mode" not in table:
        if config.activation_checkpoint is None and table:
            raise ConfigError(
                f"{file}: 'activation_checkpoint.{next(iter(table))}' needs "
                "activation_checkpoint.mode: there is no checkpointing otherwise"
            )
        if config.activation_checkpoint is None:
            del tables["activation_checkpoint"]
        return
    mode = table.pop("mode")
    choices = ["none", *_MODES]
    if not isinstance(mode, str) or mode not in choices:
        hint = nearest(mode, choices) if isinstance(mode, str) else ""
        raise ConfigError(
            f"{file}: 'activation_checkpoint.mode' must be one of "
            f"{', '.join(map(repr, choices))}, got {mode!r}{hint if 'did you' in hint else ''}"
        )
    if mode == "none":
        if table:
            raise ConfigError(
                f"{file}: 'activation_checkpoint.{next(iter(table))}' means nothing with mode 'none'"
            )
        del tables["activation_checkpoint"]
        config.activation_checkpoint = None
    else:
        cls = getattr(kinds, _MODES[mode]).Config
        # Kept if it is of that kind: the registry's own values are below the file's.
        if type(config.activation_checkpoint) is not cls:
            config.activation_checkpoint = cls()
    record("activation_checkpoint", file, sources)


def apply_short_optimizer(config: Any, tables: dict[str, Any], file: str, sources: Sources) -> None:
    """Take name, lr, beta1, ... out of ``[optimizer]`` into its one group of parameters.

    Raises:
        ConfigError: if there is more than one group to apply them to, or a value of wrong type.
    """
    from torchtitan.components.optimizer import default_adamw

    table = tables.get("optimizer")
    if not isinstance(table, dict):
        return
    found = {k: v for k, v in table.items() if k in _SHORT}
    if not found:
        return
    tables["optimizer"] = {k: v for k, v in table.items() if k not in _SHORT}
    groups = config.optimizer.param_groups or default_adamw().param_groups
    if "param_groups" in table or len(groups) != 1:
        raise ConfigError(
            f"{file}: 'optimizer.{next(iter(found))}' is for a single group of parameters; set it in "
            "[[optimizer.param_groups]] optimizer_kwargs"
        )
    for key, value in found.items():
        if key == "name":
            if not isinstance(value, str):
                raise ConfigError(f"{file}: 'optimizer.name' must be a string, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{file}: 'optimizer.{key}' must be a number, got {value!r}")
    name = found.pop("name", None)
    old = groups[0].optimizer_kwargs
    kwargs: dict[str, Any] = {k: float(v) for k, v in found.items() if not k.startswith("beta")}
    if {"beta1", "beta2"} & set(found):
        beta1, beta2 = old.get("betas", (0.9, 0.95))
        kwargs["betas"] = (float(found.get("beta1", beta1)), float(found.get("beta2", beta2)))
    group = dataclasses.replace(
        groups[0],
        optimizer_name=name or groups[0].optimizer_name,
        optimizer_kwargs={**old, **kwargs},
    )
    config.optimizer = dataclasses.replace(config.optimizer, param_groups=[group])
    path = "optimizer.param_groups.0"
    if name:
        record(f"{path}.optimizer_name", file, sources)
    for key in kwargs:
        record(f"{path}.optimizer_kwargs.{key}", file, sources)
