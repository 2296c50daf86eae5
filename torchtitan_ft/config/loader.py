"""A TOML file, those it inherits from, and the command line -> torchtitan's own Config."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from .errors import ConfigError, nearest
from .fields import Sources, overlay, rebuild
from .legacy import refuse_old_fault_tolerance, short_optimizer, translate
from .ranges import check_ranges

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)

_ACTIVATION_CHECKPOINT = {
    "selective": "SelectiveAC",
    "full": "FullAC",
    "memory_budget": "MemoryBudgetAC",
}


@dataclass(frozen=True)
class LoadedConfig:
    """The job, and where each of its values comes from."""

    config: Any
    """A ``Trainer.Config``."""
    sources: Sources
    """Dotted field path -> file or "command line"; what is not listed comes from the registry."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    adapt: Callable[[Trainer.Config], Trainer.Config] = lambda config: config,
) -> LoadedConfig:
    """Load ``path``: registry function < base files < file < command line.

    Args:
        path: a TOML file.
        overrides: as torchtitan's command line, ``["--training.steps", "20"]``.
        adapt: applied to what the registry function returns.

    Raises:
        ConfigError: for anything a user can get wrong; nothing has been started by then.
    """
    chain = _read_chain(Path(path), ())
    job: dict[str, Any] = {}
    files: list[tuple[str, dict[str, Any]]] = []
    for file, raw in chain:
        translated = translate(raw, file)
        if translated.notes:
            logger.warning("%s is for torchtitan 0.2: %s", file, "; ".join(translated.notes))
        tables = translated.tables
        job.update(_job(tables.pop("job", {}), file))
        files.append((file, tables))
    last = files[-1][0]
    for key in ("module", "config"):
        if key not in job:
            raise ConfigError(
                f"{last}: [job] {key} is missing, such as module = 'llama3', "
                "config = 'llama3_debugmodel'"
            )
    config: Any = adapt(_registry_config(job["module"], job["config"], last))
    sources: Sources = {}
    for file, tables in files:
        config = _apply(config, tables, file, sources)
    if overrides:
        config = _command_line(config, overrides, sources)
    check_ranges(config, sources)
    return LoadedConfig(config, sources)


def _read_chain(path: Path, seen: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    """The file and those it is based on, base first."""
    resolved = path.resolve()
    if resolved in seen:
        cycle = " -> ".join(str(p) for p in (*seen, resolved))
        raise ConfigError(f"{path}: 'base' goes in a circle: {cycle}")
    try:
        with path.open("rb") as f:
            tables = tomli.load(f)
    except OSError as error:
        by = f" (base of {seen[-1]})" if seen else ""
        raise ConfigError(f"{path}{by}: cannot be read: {error.strerror}") from error
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8: {error}") from error
    base = tables.pop("base", None)
    if base is None:
        return [(str(path), tables)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: 'base' must be the name of a file, got {base!r}")
    return [*_read_chain(path.parent / base, (*seen, resolved)), (str(path), tables)]


def _job(table: Any, file: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: 'job' is a table, got {table!r}")
    for key, value in table.items():
        if key not in ("module", "config"):
            raise ConfigError(
                f"{file}: unknown key 'job.{key}'{nearest(key, ['module', 'config'])}"
            )
        if not isinstance(value, str):
            raise ConfigError(f"{file}: 'job.{key}' must be a string, got {value!r}")
    return table


def _registry_config(module: str, name: str, file: str) -> Trainer.Config:
    """What the torchtitan registry function ``module``.``name`` returns."""
    from torchtitan.models import _supported_models
    from torchtitan.trainer import Trainer

    if module in _supported_models:
        candidates = [f"torchtitan.models.{module}.config_registry"]
    else:
        candidates = [f"{module}.config_registry", module]
    found = None
    for candidate in candidates:
        try:
            exists = importlib.util.find_spec(candidate) is not None
        except ModuleNotFoundError:
            exists = False
        if exists:
            try:
                found = importlib.import_module(candidate)
            except Exception as error:  # whatever the user's module does
                raise ConfigError(
                    f"{file}: [job] module {module!r}: importing {candidate} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            break
    if found is None:
        raise ConfigError(
            f"{file}: [job] module {module!r} is neither a torchtitan model nor an importable module"
            f"{nearest(module, _supported_models)}"
        )
    function = getattr(found, name, None)
    if not callable(function):
        names = [
            n
            for n, value in vars(found).items()
            if callable(value) and getattr(value, "__module__", None) == found.__name__
        ]
        raise ConfigError(
            f"{file}: [job] config {name!r} is not in {found.__name__}{nearest(name, names)}"
        )
    config = function()
    if not isinstance(config, Trainer.Config):
        raise ConfigError(f"{file}: [job] {module}.{name} returned no Trainer.Config")
    return config


def _apply(config: Any, tables: dict[str, Any], file: str, sources: Sources) -> Any:
    tables = dict(tables)
    refuse_old_fault_tolerance(tables, file)
    if "activation_checkpoint" in tables:
        config = _activation_checkpoint(config, tables, file, sources)
    if isinstance(tables.get("optimizer"), dict):
        groups = config.optimizer.param_groups
        tables["optimizer"], name, kwargs = short_optimizer(tables["optimizer"], groups, file)
        if name or kwargs:
            group = dataclasses.replace(
                groups[0],
                optimizer_name=name or groups[0].optimizer_name,
                optimizer_kwargs={**groups[0].optimizer_kwargs, **kwargs},
            )
            optimizer = dataclasses.replace(config.optimizer, param_groups=[group])
            config = rebuild(config, {"optimizer": optimizer}, file=file, path="optimizer")
            sources["optimizer.param_groups"] = file
    return overlay(config, tables, file=file, path="", sources=sources)


def _activation_checkpoint(config: Any, tables: dict[str, Any], file: str, sources: Sources) -> Any:
    """``mode`` picks torchtitan's class; the rest of the table are its fields."""
    from torchtitan.distributed import activation_checkpoint as kinds

    table = tables["activation_checkpoint"]
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: 'activation_checkpoint' is a table, got {table!r}")
    table = dict(table)
    mode = table.pop("mode", None)
    tables["activation_checkpoint"] = table
    if mode is None:
        if config.activation_checkpoint is None and table:
            raise ConfigError(f"{file}: 'activation_checkpoint' has no mode")
        return config
    if mode == "none":
        if table:
            raise ConfigError(
                f"{file}: 'activation_checkpoint.{next(iter(table))}' means nothing with mode 'none'"
            )
        del tables["activation_checkpoint"]
        chosen = None
    elif mode in _ACTIVATION_CHECKPOINT:
        chosen = getattr(kinds, _ACTIVATION_CHECKPOINT[mode]).Config()
    else:
        choices = ["none", *_ACTIVATION_CHECKPOINT]
        raise ConfigError(
            f"{file}: 'activation_checkpoint.mode' must be one of {', '.join(choices)}, "
            f"got {mode!r}{nearest(str(mode), choices)}"
        )
    sources["activation_checkpoint"] = file
    return rebuild(config, {"activation_checkpoint": chosen}, file=file, path="")


def _command_line(config: Any, overrides: Sequence[str], sources: Sources) -> Any:
    """torchtitan's own command line (tyro) over ``config``."""
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    if not getattr(_command_line, "registered", False):
        ConfigManager.register_tyro_rules(custom_registry)
        _command_line.registered = True  # type: ignore[attr-defined]
    said = io.StringIO()
    wants_help = "--help" in overrides or "-h" in overrides
    try:
        with contextlib.nullcontext() if wants_help else contextlib.redirect_stderr(said):
            result = tyro.cli(
                type(config), args=list(overrides), default=config, registry=custom_registry
            )
    except SystemExit as stop:
        if wants_help and not stop.code:
            raise
        raise ConfigError(f"command line: {_plain(said.getvalue())}") from None
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from error
    for override in overrides:
        if override.startswith("--"):
            name = override[2:].split("=", 1)[0].replace("-", "_")
            sources[name.replace(".no_", ".")] = "command line"
    return result


def _plain(text: str) -> str:
    """tyro's framed message as one line."""
    lines = (line.strip("│╭╮╰╯─ \n") for line in text.splitlines())
    words = [line for line in lines if line and not line.startswith("For full helptext")]
    return " ".join(words) or "not understood"
