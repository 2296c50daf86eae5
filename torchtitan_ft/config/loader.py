"""A TOML file, those it inherits from, and the command line -> torchtitan's own Config."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_line import apply_overrides
from .errors import ConfigError
from .fields import Sources, leaves, overlay, revalidate, source_of
from .files import read_chain
from .legacy import translate
from .ranges import check_ranges
from .registry import Job
from .special import apply_short_optimizer, choose_activation_checkpoint

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedConfig:
    """The job, and where each of its values comes from."""

    config: Any
    """A ``Trainer.Config``."""
    sources: Sources
    """Dotted path of every field -> the file that set it, "command line", or "registry"."""


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
    job = Job(file=str(path))
    files: list[tuple[str, dict[str, Any]]] = []
    for file, raw in read_chain(Path(path)):
        translated = translate(raw, file)
        if translated.notes:
            logger.warning("%s is for torchtitan 0.2: %s", file, "; ".join(translated.notes))
        job.update(translated.tables.pop("job", {}), translated.model, file)
        files.append((file, translated.tables))
    base = job.base()
    try:
        config: Any = adapt(base)
    except (TypeError, ValueError) as error:
        # Such as the Config of another trainer, with fields that ours does not have.
        raise ConfigError(
            f"{job.file}: [job] module {job.module!r} cannot be used here: {error}"
        ) from error
    touched: Sources = {}
    for file, tables in files:
        config = copy.copy(config)
        choose_activation_checkpoint(config, tables, file, touched)
        apply_short_optimizer(config, tables, file, touched)
        config = overlay(config, tables, file=file, path="", sources=touched)
    config = revalidate(config, touched)
    if overrides:
        config = apply_overrides(config, overrides, touched)
    check_ranges(config, touched)
    sources = {field: source_of(field, touched) for field, _ in leaves(config)}
    sources.setdefault("activation_checkpoint", source_of("activation_checkpoint", touched))
    return LoadedConfig(config, sources)
