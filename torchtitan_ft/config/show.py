"""Showing a job: every field, its value, and where that comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

from .loader import LoadedConfig


def format_config(loaded: LoadedConfig) -> str:
    """One line a field: ``path = value  # source``."""
    rows: list[tuple[str, str]] = []
    _collect(loaded.config, "", rows)
    width = min(max(len(f"{path} = {value}") for path, value in rows), 80)
    return "\n".join(
        f"{f'{path} = {value}':{width}}  # {_source(path, loaded.sources)}" for path, value in rows
    )


def _collect(config: Any, path: str, rows: list[tuple[str, str]]) -> None:
    for field in dataclasses.fields(config):
        if field.name == "model_spec":
            spec = config.model_spec
            rows.append(("model_spec", f"{spec.name} {spec.flavor}" if spec else "None"))
            continue
        where = f"{path}.{field.name}" if path else field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            if path == "" and field.name == "activation_checkpoint":
                rows.append((where, type(value).__qualname__.split(".")[0]))
            _collect(value, where, rows)
        else:
            rows.append((where, repr(value)))


def _source(path: str, sources: dict[str, str]) -> str:
    return sources.get(path, "registry")
