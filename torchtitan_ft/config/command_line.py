"""torchtitan's own command line over a config."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from .errors import ConfigError
from .fields import Sources, leaves, record

COMMAND_LINE = "command line"


def apply_overrides(config: Any, overrides: Sequence[str], sources: Sources) -> Any:
    """``config`` with torchtitan's ``--section.key value`` applied; ``--help`` shows all, and exits.

    Raises:
        ConfigError: whatever the parser or a check of the config refuses.
    """
    import tyro

    arguments = list(overrides)
    said = io.StringIO()
    wants_help = "--help" in arguments or "-h" in arguments
    quiet = contextlib.nullcontext() if wants_help else contextlib.redirect_stderr(said)
    try:
        with quiet:
            result = tyro.cli(type(config), args=arguments, default=config, registry=_registry())
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(f"{COMMAND_LINE}: {_plain(said.getvalue())}") from None
    except Exception as error:  # a check of torchtitan's that is no ValueError
        raise ConfigError(f"{COMMAND_LINE}: {' '.join(str(error).split())}") from error
    before, after = dict(leaves(config)), dict(leaves(result))
    named = {a[2:].split("=", 1)[0].replace("-", "_") for a in arguments if a.startswith("--")}
    named |= {name.replace(".no_", ".") for name in named}  # --section.no-flag
    for path, value in after.items():
        if path in named or path not in before or value != before[path]:
            record(path, COMMAND_LINE, sources)
    return result


@cache
def _registry() -> Any:
    """torchtitan's parsing rules; they may be registered only once."""
    from torchtitan.config.manager import ConfigManager, custom_registry

    ConfigManager.register_tyro_rules(custom_registry)
    return custom_registry


def _plain(text: str) -> str:
    """tyro's framed message as one line, with the nearest option instead of its help."""
    lines = [re.sub(r"^[│ ]+|[│ ]+$", "", line) for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] not in "╭╰"]
    message: list[str] = []
    for line in lines:
        if line.startswith("─"):
            break
        message.append(line)
    near = ""
    if "Perhaps you meant:" in lines:
        options = lines[lines.index("Perhaps you meant:") + 1 :]
        found = next((line.split()[0] for line in options if line.startswith("--")), "")
        near = f"; did you mean {found!r}?" if found else ""
    return (" ".join(message) or "not understood") + near
