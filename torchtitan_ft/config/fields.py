"""Laying TOML values over a tree of config dataclasses, strictly.

The *instance* is walked, not the annotations: torchtitan annotates ``checkpoint``, ``dataloader`` and
``loss`` with base classes. Types are checked here, since a dataclass takes anything; the tree is rebuilt
with ``dataclasses.replace``, so that every ``__post_init__`` runs again.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from .errors import ConfigError, nearest

Sources = dict[str, str]


def settable_fields(config: Any) -> dict[str, Any]:
    """Fields a file may set, with their annotations. ``model_spec`` and callables are code, not data."""
    try:
        hints = typing.get_type_hints(type(config))
    except NameError:  # a name that is imported for type checkers only
        hints = {f.name: f.type for f in dataclasses.fields(config)}
    return {
        f.name: hints[f.name]
        for f in dataclasses.fields(config)
        if f.init and f.name != "model_spec" and not _is_code(hints[f.name])
    }


def _is_code(annotation: Any) -> bool:
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(get_origin(o) is Callable or o is Callable for o in options) or any(
        get_origin(o) is typing.get_origin(Callable[..., Any]) for o in options
    )


def overlay(config: Any, table: dict[str, Any], *, file: str, path: str, sources: Sources) -> Any:
    """``config`` with the values of ``table``.

    Args:
        config: a config dataclass.
        table: parsed TOML.
        file: named in errors and in ``sources``.
        path: dotted path of ``config`` in the whole; empty for the root.
        sources: gets ``file`` for every field set.

    Raises:
        ConfigError: unknown key, wrong type, or a value that ``__post_init__`` refuses.
    """
    known = settable_fields(config)
    changes: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            kind = "table" if isinstance(value, dict) else "key"
            raise ConfigError(f"{file}: unknown {kind} {where!r}{nearest(key, known)}")
        current = getattr(config, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{file}: {where!r} is a table, got {_describe(value)}")
            changes[key] = overlay(current, value, file=file, path=where, sources=sources)
        else:
            changes[key] = convert(value, known[key], file=file, path=where)
            sources[where] = file
    return rebuild(config, changes, file=file, path=path)


def rebuild(config: Any, changes: dict[str, Any], *, file: str, path: str) -> Any:
    """``dataclasses.replace`` with the user's errors told as such."""
    try:
        return dataclasses.replace(config, **changes)
    except (ValueError, TypeError) as error:
        where = f"[{path}]" if path else "the settings"
        raise ConfigError(f"{file}: {where}: {error}") from error


def convert(value: Any, annotation: Any, *, file: str, path: str) -> Any:
    """``value`` as the annotated type; raises :class:`ConfigError` if it is none."""
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if annotation is Any:
        return value
    if _is_union(annotation):
        return _convert_union(value, get_args(annotation), file=file, path=path)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        choices = ", ".join(repr(a) for a in arguments)
        hint = nearest(value, map(str, arguments)) if isinstance(value, str) else ""
        hint = hint if "did you mean" in hint else ""
        raise ConfigError(f"{file}: {path!r} must be one of {choices}, got {value!r}{hint}")
    if dataclasses.is_dataclass(annotation):
        return _convert_dataclass(value, annotation, file=file, path=path)
    if origin in (list, tuple, set) and isinstance(value, list):
        item = arguments[0] if arguments else Any
        return origin(convert(v, item, file=file, path=f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, dict):
        item = arguments[1] if arguments else Any
        return {k: convert(v, item, file=file, path=f"{path}.{k}") for k, v in value.items()}
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or annotation
    if isinstance(plain, type) and isinstance(value, plain):
        if plain is not bool and isinstance(value, bool):
            raise ConfigError(
                f"{file}: {path!r} must be {_name(annotation)}, got {_describe(value)}"
            )
        return value
    raise ConfigError(f"{file}: {path!r} must be {_name(annotation)}, got {_describe(value)}")


def _convert_union(value: Any, options: tuple[Any, ...], *, file: str, path: str) -> Any:
    others = [o for o in options if o is not type(None)]
    # TOML has no null: the word stands for it where null is meant to be possible.
    if type(None) in options and value == "none":
        return None
    for option in others:  # exact types first: 1 stays an int where int | float is meant
        if isinstance(option, type) and type(value) is option:
            return value
    errors = []
    for option in others:
        try:
            return convert(value, option, file=file, path=path)
        except ConfigError as error:
            errors.append(error)
    if len(others) == 1:
        raise errors[0]
    names = " or ".join(_name(o) for o in others)
    raise ConfigError(f"{file}: {path!r} must be {names}, got {_describe(value)}")


def _convert_dataclass(value: Any, cls: Any, *, file: str, path: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {path!r} is a table, got {_describe(value)}")
    hints = typing.get_type_hints(cls)
    names = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in value:
        if key not in names:
            raise ConfigError(f"{file}: unknown key {f'{path}.{key}'!r}{nearest(key, names)}")
    missing = [
        n
        for n, f in names.items()
        if n not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{file}: {path!r} needs {', '.join(missing)}")
    values = {k: convert(v, hints[k], file=file, path=f"{path}.{k}") for k, v in value.items()}
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: [{path}]: {error}") from error


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _name(annotation: Any) -> str:
    return {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        list: "a list",
        dict: "a table",
        tuple: "a list",
    }.get(get_origin(annotation) or annotation, str(annotation))


def _describe(value: Any) -> str:
    kind = {bool: "", int: "", float: "", str: "the string ", list: "the list ", dict: "the table "}
    return f"{kind.get(type(value), '')}{value!r}"
