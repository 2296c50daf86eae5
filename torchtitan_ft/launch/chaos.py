"""Faults to inject, as text: ``kill:domain=2,step=8,phase=backward[,rank=0]``, split by ``;``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ACTIONS = ("kill",)
PHASES = ("before_step", "forward", "backward", "mirror", "vote", "optimizer", "after_commit")
_KEYS = ("domain", "step", "phase", "rank")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what happens, where and when."""

    action: str
    domain: str
    step: int
    phase: str
    rank: int | None = None
    """Rank inside the domain; None means all of them."""

    def __str__(self) -> str:
        text = f"{self.action}:domain={self.domain},step={self.step},phase={self.phase}"
        return text if self.rank is None else f"{text},rank={self.rank}"


def parse(spec: str) -> tuple[Fault, ...]:
    """The faults in ``spec``; none if it is empty.

    Raises:
        ValueError: naming the part that is wrong, and the nearest valid name.
    """
    if not spec.strip():
        return ()
    return tuple(_parse_fault(part.strip()) for part in spec.split(";"))


def matching(faults: Iterable[Fault], domain: str, rank: int) -> tuple[Fault, ...]:
    """The faults that concern rank ``rank`` of ``domain``."""
    return tuple(f for f in faults if f.domain == domain and f.rank in (None, rank))


def _parse_fault(text: str) -> Fault:
    if not text:
        raise ValueError("empty fault in the chaos specification (a ';' too many?)")
    action, colon, rest = text.partition(":")
    action = action.strip()
    if not colon:
        raise ValueError(f"{text!r} is not ACTION:key=value,...")
    _check_name("action", action, ACTIONS, text)
    values: dict[str, str] = {}
    for item in rest.split(","):
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{item.strip()!r} in {text!r} is not key=value")
        _check_name("key", key, _KEYS, text)
        if key in values:
            raise ValueError(f"key {key!r} occurs twice in {text!r}")
        values[key] = value
    missing = [key for key in _KEYS[:3] if key not in values]
    if missing:
        raise ValueError(f"{text!r} lacks {', '.join(missing)}")
    _check_name("phase", values["phase"], PHASES, text)
    rank = _number("rank", values["rank"], 0, text) if "rank" in values else None
    step = _number("step", values["step"], 1, text)
    return Fault(action, values["domain"], step, values["phase"], rank)


def _check_name(what: str, name: str, valid: Sequence[str], text: str) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}"
        raise ValueError(f"unknown {what} {name!r} in {text!r}; {hint}")


def _number(what: str, value: str, least: int, text: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise ValueError(f"{what} must be a whole number from {least}, got {value!r} in {text!r}")
    return int(value)
