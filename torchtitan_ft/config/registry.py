"""The torchtitan registry function a job starts from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, nearest

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_PREFIXES = (
    "torchtitan.models",
    "torchtitan.experiments",
    "torchtitan.experiments.rl.examples",
)


@dataclass
class Job:
    """What ``[job]``, or ``[model]`` of 0.2, say in a file and those it is based on."""

    module: str = ""
    config: str = ""
    flavor: str = ""
    """A flavor of the module's ``model_registry``; with ``config`` it replaces that one's model."""
    file: str = ""
    """The file that had the last word, for errors."""

    def update(self, table: Any, model: dict[str, str], file: str) -> None:
        """Take over one file's ``[job]`` table, and name and flavor of its ``[model]``.

        Raises:
            ConfigError: for an unknown key, or a value that is no string.
        """
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: 'job' is a table, got {table!r}")
        known = ["module", "config"]
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{file}: unknown key 'job.{key}'{nearest(key, known)}")
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{file}: 'job.{key}' must be a name, got {value!r}")
        if table or model:
            self.file = file
        if "name" in model:
            self.module, self.config = model["name"], ""
        self.module = table.get("module", self.module)
        if "config" in table:
            self.config, self.flavor = table["config"], ""
        self.flavor = model.get("flavor", self.flavor)

    def base(self) -> Trainer.Config:
        """What the registry function returns.

        Raises:
            ConfigError: if something is missing, unknown, or fails.
        """
        if not self.module:
            raise self._missing("module")
        if not self.config and not self.flavor:
            raise self._missing("config")
        registry = self._import()
        if self.config:
            config = self._call(registry, self.config)
            return self._with_flavor(config, registry) if self.flavor else config
        # As torchtitan names its functions: qwen3, 30B-A3B -> qwen3_30b_a3b.
        words = f"{self.module.rpartition('.')[2]}_{self.flavor}".lower()
        name = words.replace("-", "_").replace(".", "_")
        functions = _functions(registry)
        if name not in functions:
            # Any job of this model will do to start from: an old file says the rest itself.
            name = next((f for f in functions if f.endswith("debugmodel")), "")
            name = name or next(iter(functions), "debugmodel")
        return self._with_flavor(self._call(registry, name), registry)

    def _missing(self, key: str) -> ConfigError:
        return ConfigError(
            f"{self.file}: [job] {key} is missing, such as module = 'llama3', "
            "config = 'llama3_debugmodel'"
        )

    def _import(self) -> ModuleType:
        from torchtitan.experiments import _supported_experiments
        from torchtitan.models import _supported_models

        known = _supported_models | _supported_experiments
        if self.module in known:
            candidates = [f"{prefix}.{self.module}.config_registry" for prefix in _PREFIXES]
        else:
            candidates = [f"{self.module}.config_registry", self.module]
        for candidate in candidates:
            try:
                return importlib.import_module(candidate)
            except Exception as error:  # whatever the user's module does
                # Only if it is the candidate that does not exist, or a package it would be in; what
                # a module that exists cannot import is the user's to see.
                missing = error.name if isinstance(error, ModuleNotFoundError) else None
                if missing and f"{candidate}.".startswith(f"{missing}."):
                    continue
                raise ConfigError(
                    f"{self.file}: [job] module {self.module!r}: importing {candidate} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        raise ConfigError(
            f"{self.file}: [job] module {self.module!r} is neither a torchtitan model nor an "
            f"importable module{nearest(self.module, known)}"
        )

    def _call(self, registry: ModuleType, name: str) -> Trainer.Config:
        from torchtitan.trainer import Trainer

        function = getattr(registry, name, None)
        if not callable(function):
            raise ConfigError(
                f"{self.file}: [job] config {name!r} is not in {registry.__name__}"
                f"{nearest(name, _functions(registry))}"
            )
        try:
            config = function()
        except Exception as error:
            raise ConfigError(
                f"{self.file}: [job] config: {registry.__name__}.{name}() failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(config, Trainer.Config):
            raise ConfigError(
                f"{self.file}: [job] config: {registry.__name__}.{name}() returned "
                f"{type(config).__name__}, no Trainer.Config"
            )
        return config

    def _with_flavor(self, config: Trainer.Config, registry: ModuleType) -> Trainer.Config:
        """``config`` with the model of another flavor, and the loss that fits it."""
        from torchtitan.models.common.config_utils import decoder_vocab_size

        if config.model_spec is not None and config.model_spec.flavor == self.flavor:
            return config
        package = importlib.import_module(registry.__name__.removesuffix(".config_registry"))
        models = getattr(package, "model_registry", None)
        if models is None:
            raise ConfigError(
                f"{self.file}: 'model.flavor': {package.__name__} has no model_registry; "
                "name a function in [job] config"
            )
        try:
            config.model_spec = models(self.flavor)
        except KeyError as error:
            tables = [v for n, v in vars(package).items() if n.endswith("_configs")]
            flavors = [name for table in tables if isinstance(table, dict) for name in table]
            raise ConfigError(
                f"{self.file}: 'model.flavor' {self.flavor!r} is not one of {package.__name__}"
                f"{nearest(self.flavor, flavors)}"
            ) from error
        loss: Any = config.loss
        while loss is not None:
            if getattr(loss, "global_vocab_size", None) is not None:
                loss.global_vocab_size = decoder_vocab_size(config.model_spec)
            loss = getattr(loss, "loss_fn", None)
        return config


def _functions(registry: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(registry).items()
        if callable(value)
        and not name.startswith("_")
        and not isinstance(value, type)
        and getattr(value, "__module__", None) == registry.__name__
    }
