"""Files written for torchtitan 0.2: renamed keys are mapped, keys without successor refused by name.

Also the short spellings that stay useful: ``[optimizer] name/lr/...`` for a single group of parameters.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError

_RENAMED_TABLES = {"profiling": "profiler", "validation": "validator"}

_RENAMED_KEYS = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "validator.dataset": "validator.dataloader.dataset",
    "validator.dataset_path": "validator.dataloader.dataset_path",
}

_IGNORED = {"job.description"}

_GONE = {
    "job.custom_config_module": "name your own module in [job] module",
    "job.config_file": "it is the --config argument",
    "experimental": "name your own module in [job] module",
    "memory_estimation": "it was removed from torchtitan",
    "quantize": "use a registry function with converters, such as llama3_debugmodel_float8",
    "model.converters": "use a registry function with converters, such as llama3_debugmodel_float8",
    "model.tokenizer_path": "use hf_assets_path",
    "model.print_after_conversion": "it was removed from torchtitan",
    "optimizer.early_step_in_backward": "it was removed from torchtitan",
    "parallelism.disable_loss_parallel": "it was removed from torchtitan",
    "parallelism.context_parallel_rotate_method": "it was removed from torchtitan",
    "parallelism.expert_tensor_parallel_degree": "it was removed from torchtitan",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "it was removed from torchtitan",
    "parallelism.pipeline_parallel_split_points": "use parallelism.module_fqns_per_model_part",
    "activation_checkpoint.selective_ac_option": "selective checkpointing is per operator now",
    "validator.local_batch_size": "validation uses training.local_batch_size",
    "validator.seq_len": "validation uses training.seq_len",
}

_OLD_FAULT_TOLERANCE = {
    "enable",
    "process_group",
    "process_group_timeout_ms",
    "replica_id",
    "group_size",
    "min_replica_size",
    "semi_sync_method",
}

_OPTIMIZER_WORDS = {
    "name": "optimizer_name",
    "lr": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
}


@dataclass
class Translated:
    """The tables of one file, in today's names."""

    tables: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What was renamed or ignored, for one report."""


def translate(tables: dict[str, Any], file: str) -> Translated:
    """Today's names for ``tables``.

    Raises:
        ConfigError: for a key that has no successor.
    """
    result = Translated(deepcopy(tables))
    tables, notes = result.tables, result.notes
    for old, new in _RENAMED_TABLES.items():
        if old in tables:
            _merge(tables, new, tables.pop(old))
            notes.append(f"[{old}] is [{new}]")
    for path in _IGNORED:
        if _pop(tables, path) is not None:
            notes.append(f"{path} is ignored")
    _drop_disabled(tables, notes)
    for path, hint in _GONE.items():
        value = _get(tables, path)
        if value is None:
            continue
        if value in ([], {}, ""):  # said nothing in 0.2 either
            _pop(tables, path)
            notes.append(f"{path} is ignored")
        else:
            raise ConfigError(f"{file}: {path!r} has no successor in torchtitan 0.3: {hint}")
    for old, new in _RENAMED_KEYS.items():
        value = _pop(tables, old)
        if value is not None:
            *parents, key = new.split(".")
            _merge(tables, ".".join(parents), {key: value})
            notes.append(f"{old} is {new}")
    _model(tables, notes, file)
    if notes:
        # Files of that time know no CUDA graphs, which are on by default now.
        tables.setdefault("training", {}).setdefault("disable_cuda_graphs", True)
    for table in ("job", "model"):
        if tables.get(table) == {}:
            del tables[table]
    return result


def _drop_disabled(tables: dict[str, Any], notes: list[str]) -> None:
    """Tables of features that are gone, or mean something else now, but are switched off there."""
    estimation = tables.get("memory_estimation")
    if isinstance(estimation, dict) and not estimation.get("enabled"):
        del tables["memory_estimation"]
        notes.append("[memory_estimation] is ignored")
    mode = _get(tables, "activation_checkpoint.mode")
    if (
        _get(tables, "activation_checkpoint.selective_ac_option") is not None
        and mode != "selective"
    ):
        _pop(tables, "activation_checkpoint.selective_ac_option")
        notes.append("activation_checkpoint.selective_ac_option is ignored")
    for path in ("optimizer.early_step_in_backward", "parallelism.disable_loss_parallel"):
        if _get(tables, path) is False:
            _pop(tables, path)
            notes.append(f"{path} is ignored")
    old = tables.get("fault_tolerance")
    if isinstance(old, dict) and old.get("enable") is False and set(old) <= _OLD_FAULT_TOLERANCE:
        del tables["fault_tolerance"]
        notes.append("[fault_tolerance] of torchft is ignored")


def refuse_old_fault_tolerance(tables: dict[str, Any], file: str) -> None:
    """torchft's keys under our table's name; raises :class:`ConfigError` naming the first."""
    for key in sorted(_OLD_FAULT_TOLERANCE & set(tables.get("fault_tolerance", {}))):
        raise ConfigError(
            f"{file}: 'fault_tolerance.{key}' is torchft's; here redundancy is "
            "fault_tolerance.overlap, and domains are fault_tolerance.domain and domains"
        )


def _model(tables: dict[str, Any], notes: list[str], file: str) -> None:
    model = tables.get("model")
    if not isinstance(model, dict) or not {"name", "flavor"} & set(model):
        return
    name, flavor = model.pop("name", None), model.pop("flavor", None)
    if not name or not flavor:
        raise ConfigError(f"{file}: [model] needs both name and flavor")
    config = f"{name}_{str(flavor).lower()}"
    job = tables.setdefault("job", {})
    job.setdefault("module", name)
    job.setdefault("config", config)
    notes.append(f"model.name and model.flavor are [job] module = {name!r}, config = {config!r}")


def short_optimizer(
    table: dict[str, Any], groups: list[Any], file: str
) -> tuple[dict[str, Any], str | None, dict[str, Any]]:
    """Take name, lr, beta1, ... out of an ``[optimizer]`` table.

    Returns:
        The rest of the table, the optimizer's name if given, and keyword arguments for its one group.

    Raises:
        ConfigError: if there is more than one group to apply them to, or a value is no number.
    """
    found = {k: v for k, v in table.items() if k in _OPTIMIZER_WORDS}
    rest = {k: v for k, v in table.items() if k not in _OPTIMIZER_WORDS}
    if not found:
        return rest, None, {}
    if "param_groups" in rest or len(groups) != 1:
        key = next(iter(found))
        raise ConfigError(
            f"{file}: 'optimizer.{key}' is for a single group of parameters; set it in "
            "[[optimizer.param_groups]] optimizer_kwargs"
        )
    name = found.pop("name", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{file}: 'optimizer.name' must be a string, got {name!r}")
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{file}: 'optimizer.{key}' must be a number, got {value!r}")
    beta1, beta2 = groups[0].optimizer_kwargs.get("betas", (0.9, 0.95))
    kwargs: dict[str, Any] = {k: float(v) for k, v in found.items() if not k.startswith("beta")}
    if {"beta1", "beta2"} & set(found):
        kwargs["betas"] = (float(found.get("beta1", beta1)), float(found.get("beta2", beta2)))
    return rest, name, kwargs


def _get(tables: dict[str, Any], path: str) -> Any:
    value: Any = tables
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _pop(tables: dict[str, Any], path: str) -> Any:
    *parents, key = path.split(".")
    table = _get(tables, ".".join(parents)) if parents else tables
    return table.pop(key, None) if isinstance(table, dict) else None


def _merge(tables: dict[str, Any], path: str, values: Any) -> None:
    table = tables
    for name in path.split(".") if path else []:
        table = table.setdefault(name, {})
    if isinstance(values, dict):
        table.update({k: v for k, v in values.items() if k not in table})
