"""Reading a TOML file and those it is based on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli

from .errors import ConfigError


def read_chain(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names and tables of the file and of those it is based on, the remotest base first.

    Raises:
        ConfigError: a file that cannot be read, is not valid TOML, or is based on itself.
    """
    chain: list[tuple[str, dict[str, Any]]] = []
    seen: list[Path] = []
    while True:
        by = f" (base of {chain[0][0]})" if chain else ""
        if path.resolve() in seen:
            circle = " -> ".join([*(p.name for p in seen), path.name])
            raise ConfigError(f"{chain[0][0]}: 'base' goes in a circle: {circle}")
        seen.append(path.resolve())
        tables = _read(path, by)
        base = tables.pop("base", None)
        chain.insert(0, (str(path), tables))
        if base is None:
            return chain
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{path}: 'base' must be the name of a file, got {base!r}")
        path = path.parent / base


def _read(path: Path, by: str) -> dict[str, Any]:
    try:
        with path.open("rb") as f:
            return tomli.load(f)
    except (OSError, ValueError) as error:
        if isinstance(error, tomli.TOMLDecodeError):  # says line and column
            raise ConfigError(f"{path}{by}: not valid TOML: {error}") from error
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{path}{by}: not valid UTF-8: {error}") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}{by}: cannot be read: {reason}") from error
