"""Showing a job: every field, its value, and where that comes from."""

from __future__ import annotations

from .fields import leaves
from .loader import LoadedConfig


def format_config(loaded: LoadedConfig) -> str:
    """One line a field, ``path = value  # source``, with the names the command line takes."""
    rows: dict[str, str] = {}
    for path, value in leaves(loaded.config):
        if path == "model_spec":
            rows[path] = f"{value.name} {value.flavor}" if value else "None"
        elif path.startswith("activation_checkpoint."):
            # Which class it is, is a choice of its own.
            kind = type(loaded.config.activation_checkpoint).__qualname__
            rows.setdefault("activation_checkpoint", kind.removesuffix(".Config"))
        if path not in rows:
            rows[path] = repr(value)
    width = min(max(len(f"{path} = {value}") for path, value in rows.items()), 80)
    return "\n".join(
        f"{f'{path} = {value}':{width}}  # {loaded.sources.get(path, 'registry')}"
        for path, value in rows.items()
    )
