"""Laying TOML values over a tree of config dataclasses, strictly.

The *instance* is walked, not the annotations: torchtitan annotates ``checkpoint``, ``dataloader`` and
``loss`` with base classes. Types are checked here, since a dataclass takes anything. The checks of the
dataclasses themselves run once all files are laid over (:func:`revalidate`), as they may concern fields
that come from different files.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

from .errors import ConfigError, nearest

Sources = dict[str, str]
"""Dotted field path -> the file that set it, or "command line"."""


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
    # collections.abc.Callable bare, or as the origin of Callable[..., Any].
    return any(o is Callable or get_origin(o) is Callable for o in options)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below ``value`` with its dotted path, as torchtitan's command line names them."""
    if path == "model_spec":  # code; its name and flavor say all
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), _join(path, field.name))
    elif isinstance(value, list) and value and all(map(dataclasses.is_dataclass, value)):
        for i, item in enumerate(value):
            yield from leaves(item, _join(path, str(i)))
    elif isinstance(value, dict) and value and all(isinstance(k, str) for k in value):
        for key, item in value.items():
            yield from leaves(item, _join(path, key))
    else:
        yield path, value


def source_of(path: str, sources: Sources) -> str:
    """Where the value at ``path``, or the nearest of what it is part of, comes from."""
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return "registry"


def overlay(config: Any, table: dict[str, Any], *, file: str, path: str, sources: Sources) -> Any:
    """A copy of ``config`` with the values of ``table``. Its ``__post_init__`` does not run yet.

    Args:
        config: a config dataclass.
        table: parsed TOML.
        file: named in errors and in ``sources``.
        path: dotted path of ``config`` in the whole; empty for the root.
        sources: gets ``file`` for every field set.

    Raises:
        ConfigError: unknown key or wrong type.
    """
    known = settable_fields(config)
    result = copy.copy(config)
    for key, value in table.items():
        where = _join(path, key)
        if key not in known:
            kind = "table" if isinstance(value, dict) else "key"
            raise ConfigError(f"{file}: unknown {kind} {where!r}{nearest(key, known)}")
        current = getattr(config, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{file}: {where!r} is a table, got {_describe(value)}")
            new = overlay(current, value, file=file, path=where, sources=sources)
        else:
            new = convert(value, known[key], file=file, path=where)
            record(where, file, sources)
        setattr(result, key, new)
    return result


def record(path: str, source: str, sources: Sources) -> None:
    """Note that ``source`` set ``path``, and with it all that is below."""
    for below in [p for p in sources if p.startswith(f"{path}.")]:
        del sources[below]
    sources[path] = source


def revalidate(config: Any, sources: Sources, path: str = "") -> Any:
    """``config`` with every dataclass that has a changed field made anew, so that its checks run.

    Raises:
        ConfigError: what a ``__post_init__`` refuses, with the files that changed what it checks.
    """
    below = [s for p, s in sources.items() if not path or p == path or p.startswith(f"{path}.")]
    if not below:
        return config
    changes = {
        f.name: revalidate(value, sources, _join(path, f.name))
        for f in dataclasses.fields(config)
        if f.init and f.name != "model_spec"
        if dataclasses.is_dataclass(value := getattr(config, f.name))
    }
    try:
        return dataclasses.replace(config, **changes)
    except Exception as error:  # torchtitan raises ValueError, and asserts
        where = f"[{path}]" if path else "the settings together"
        files = ", ".join(dict.fromkeys(below))
        raise ConfigError(f"{files}: {where}: {' '.join(str(error).split())}") from error


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
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
        choices = ", ".join(repr(a) for a in arguments)
        hint = nearest(value, map(str, arguments)) if isinstance(value, str) else ""
        hint = hint if "did you mean" in hint else ""  # the choices are listed already
        raise ConfigError(f"{file}: {path!r} must be one of {choices}, got {value!r}{hint}")
    if dataclasses.is_dataclass(annotation):
        return _convert_dataclass(value, annotation, file=file, path=path)
    if origin is tuple and Ellipsis not in arguments and isinstance(value, list):
        if len(value) != len(arguments):
            raise ConfigError(
                f"{file}: {path!r} must be a list of {len(arguments)} items, got {_describe(value)}"
            )
        return tuple(
            convert(v, a, file=file, path=f"{path}[{i}]")
            for i, (v, a) in enumerate(zip(value, arguments, strict=True))
        )
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
        # True is an int to Python, not to a user.
        if isinstance(value, bool) and plain is not bool:
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
    except Exception as error:
        raise ConfigError(f"{file}: [{path}]: {' '.join(str(error).split())}") from error


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name(annotation: Any) -> str:
    names: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        list: "a list",
        dict: "a table",
        tuple: "a list",
    }
    return names.get(get_origin(annotation) or annotation, str(annotation))


def _describe(value: Any) -> str:
    kind: dict[Any, str] = {str: "the string ", list: "the list ", dict: "the table "}
    return f"{kind.get(type(value), '')}{value!r}"
