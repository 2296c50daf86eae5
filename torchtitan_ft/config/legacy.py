"""Files written for torchtitan 0.2: renamed keys are mapped, keys without successor refused by name.

A key without successor that says what 0.2 did anyway (``disable_loss_parallel = false``) is dropped and
reported: complete dumps of an old configuration load.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, nearest

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

_REMOVED = "it was removed from torchtitan"
_CONVERTERS = "use a registry function with converters, such as llama3_debugmodel_float8"
_OWN_MODULE = "name your own module in [job] module"

_GONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "job.custom_config_module": (("",), _OWN_MODULE),
    "job.config_file": (("",), "it is the --config argument"),
    "model.converters": (([],), _CONVERTERS),
    "model.tokenizer_path": (("",), "use hf_assets_path"),
    "model.print_after_conversion": ((False,), _REMOVED),
    "optimizer.early_step_in_backward": ((False,), _REMOVED),
    "parallelism.disable_loss_parallel": ((False,), _REMOVED),
    "parallelism.context_parallel_rotate_method": (("allgather",), _REMOVED),
    "parallelism.expert_tensor_parallel_degree": ((1,), _REMOVED),
    "parallelism.pipeline_parallel_expert_parallel_overlap": ((True,), _REMOVED),
    "parallelism.pipeline_parallel_split_points": (
        ([],),
        "use parallelism.module_fqns_per_model_part",
    ),
    "parallelism.expert_parallel_comm_backend": (
        ("standard",),
        "use a registry function that chooses it, such as deepseek_v3_debugmodel_hybridep",
    ),
    "activation_checkpoint.early_stop": ((False,), _REMOVED),
    "activation_checkpoint.selective_ac_option": (
        ("op",),
        "selective checkpointing is per operator now",
    ),
}
"""Path -> values that are dropped with a report instead, and what to do about all others."""

_IGNORED = ("job.description", "checkpoint.enable_ft_dataloader_checkpoints")

_LOADER_DEFAULTS = {
    "num_workers": 0,
    "persistent_workers": False,
    "pin_memory": False,
}

_TORCHFT_KEYS = frozenset(
    {
        "enable",
        "process_group",
        "process_group_timeout_ms",
        "replica_id",
        "group_size",
        "min_replica_size",
        "semi_sync_method",
        "sync_steps",
        "should_quantize",
        "fragment_sync_delay",
        "fragment_update_alpha",
        "num_fragments",
        "module_fqns_per_model_fragment",
    }
)


@dataclass
class Translated:
    """The tables of one file, in today's names."""

    tables: dict[str, Any]
    model: dict[str, str] = field(default_factory=dict)
    """``name`` and ``flavor`` of 0.2's ``[model]``."""
    notes: list[str] = field(default_factory=list)
    """What was renamed or ignored, for one report; empty for a file of today."""


def translate(tables: dict[str, Any], file: str) -> Translated:
    """Today's names for ``tables``; ``tables`` itself is left alone.

    Raises:
        ConfigError: for a key that has no successor, or that is given by both its names.
    """
    result = Translated(deepcopy(tables))
    tables, notes = result.tables, result.notes
    for old, new in _RENAMED_TABLES.items():
        if isinstance(tables.get(old), dict):
            _move(tables, old, new, file)
            notes.append(f"[{old}] is [{new}]")
    for path in _IGNORED:
        if _pop(tables, path) is not None:
            notes.append(f"{path} is ignored")
    _drop_unused(tables, notes)
    _refuse_gone(tables, notes, file)
    for old, new in _RENAMED_KEYS.items():
        if _get(tables, old) is not None:
            _move(tables, old, new, file)
            notes.append(f"{old} is {new}")
    _loader(tables, notes, file)
    _model(result, file)
    _activation_checkpoint(tables, notes, file)
    _fault_tolerance(tables, notes, file)
    if notes and isinstance(tables.setdefault("training", {}), dict):
        # Files of that time know no CUDA graphs, which are on by default now.
        tables["training"].setdefault("disable_cuda_graphs", True)
    for table in ("job", "model"):
        if tables.get(table) == {}:
            del tables[table]
    return result


def _drop_unused(tables: dict[str, Any], notes: list[str]) -> None:
    """Tables and keys of features that are switched off in the file."""
    unused = []
    estimation = _get(tables, "memory_estimation")
    if isinstance(estimation, dict) and not (estimation.get("enable") or estimation.get("enabled")):
        unused.append("memory_estimation")
    experimental = _get(tables, "experimental")
    if isinstance(experimental, dict) and not any(experimental.values()):
        unused.append("experimental")
    if not _get(tables, "model.converters"):  # without converters it did nothing
        unused.append("quantize")
    mode = _get(tables, "activation_checkpoint.mode")
    if mode is not None and mode != "selective":
        unused.append("activation_checkpoint.selective_ac_option")
    for key in ("local_batch_size", "seq_len"):  # the training's are used now
        same = _get(tables, f"validator.{key}") == _get(tables, f"training.{key}")
        if same or not _get(tables, "validator.enable"):
            unused.append(f"validator.{key}")
    for path in unused:
        if _pop(tables, path) is not None:
            notes.append(f"{path} is ignored")


def _refuse_gone(tables: dict[str, Any], notes: list[str], file: str) -> None:
    for path, hint in (
        ("experimental", _OWN_MODULE),
        ("memory_estimation", _REMOVED),
        ("validator.local_batch_size", "validation uses training.local_batch_size"),
        ("validator.seq_len", "validation uses training.seq_len"),
    ):
        if _get(tables, path) is not None:
            raise _gone(path, hint, file)
    for path, (harmless, hint) in _GONE.items():
        value = _get(tables, path)
        if value is None:
            continue
        if not any(value == h and type(value) is type(h) for h in harmless):
            raise _gone(path, hint, file)
        _pop(tables, path)
        notes.append(f"{path} is ignored")


def _gone(path: str, hint: str, file: str) -> ConfigError:
    return ConfigError(f"{file}: {path!r} has no successor in torchtitan 0.3: {hint}")


def _loader(tables: dict[str, Any], notes: list[str], file: str) -> None:
    """``[training.dataloader]``: the workers of torchtitan's loaders, which ours does without."""
    for key, default in _LOADER_DEFAULTS.items():
        path = f"training.dataloader.{key}"
        value = _get(tables, path)
        if value is not None and value == default:
            _pop(tables, path)
            notes.append(f"{path} is ignored")
    rest = _get(tables, "training.dataloader")
    if isinstance(rest, dict):
        for key in list(rest):
            _move(tables, f"training.dataloader.{key}", f"dataloader.{key}", file)
            notes.append(f"training.dataloader.{key} is dataloader.{key}")
        _pop(tables, "training.dataloader")


def _model(result: Translated, file: str) -> None:
    table = result.tables.get("model", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: 'model' is a table, got {table!r}")
    for key in table:
        known = ["name", "flavor", "hf_assets_path"]
        if key not in known:
            raise ConfigError(f"{file}: unknown key {f'model.{key}'!r}{nearest(key, known)}")
    for key in ("name", "flavor"):
        value = _pop(result.tables, f"model.{key}")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{file}: 'model.{key}' must be a string, got {value!r}")
        result.model[key] = value
        result.notes.append(f"model.{key} is {'[job] module' if key == 'name' else '[job] config'}")


def _activation_checkpoint(tables: dict[str, Any], notes: list[str], file: str) -> None:
    """0.2 had the keys of all modes in one table, used or not."""
    table = tables.get("activation_checkpoint")
    if not isinstance(table, dict):
        return
    old, new = "per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns"
    if old in table:
        _move(tables, f"activation_checkpoint.{old}", f"activation_checkpoint.{new}", file)
        notes.append(f"activation_checkpoint.{old} is {new}")
    mode = table.get("mode")
    if not notes or mode is None:
        return
    unused: list[str] = []
    if mode != "selective":
        unused.append(new)
    if mode != "memory_budget":
        unused += ["memory_budget", "visualize_memory_budget_pareto"]
    if mode == "none":
        unused += ["preserve_rng_state", "determinism_check", "debug"]
    for name in unused:
        if table.pop(name, None) is not None:
            notes.append(f"activation_checkpoint.{name} is ignored")


def _fault_tolerance(tables: dict[str, Any], notes: list[str], file: str) -> None:
    """torchft's keys under our table's name."""
    table = tables.get("fault_tolerance")
    if not isinstance(table, dict):
        return
    old = sorted(_TORCHFT_KEYS & set(table))
    if not old:
        return
    if table.get("enable") is False and len(old) == len(table):
        del tables["fault_tolerance"]
        notes.append("[fault_tolerance] of torchft is ignored")
        return
    raise ConfigError(
        f"{file}: 'fault_tolerance.{old[0]}' is torchft's; here redundancy is fault_tolerance.overlap, "
        "and domains are fault_tolerance.domain and domains"
    )


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


def _move(tables: dict[str, Any], old: str, new: str, file: str) -> None:
    """Give the value at ``old`` the name ``new``; tables are merged."""
    _put(tables, new, _pop(tables, old), old, file)


def _put(tables: dict[str, Any], path: str, value: Any, old: str, file: str) -> None:
    *parents, key = path.split(".")
    table = tables
    for i, name in enumerate(parents):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {'.'.join(parents[: i + 1])!r} is a table, got {table!r}")
    if isinstance(value, dict) and isinstance(table.get(key), dict):
        for name, item in value.items():
            _put(tables, f"{path}.{name}", item, f"{old}.{name}", file)
    elif key in table:
        raise ConfigError(f"{file}: {old!r} is the old name of {path!r}, and both are given")
    else:
        table[key] = value
