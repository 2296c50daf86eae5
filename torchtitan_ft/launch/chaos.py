"""Faults to inject, as text: ``kill:domain=2,step=8,phase=backward[,rank=0]``, split by ``;``.

``random:seed=7,mtbf_steps=5,actions=kill+restart`` stands for a schedule of such faults, which
:func:`draw` makes of it: what was drawn is text like any other, and can be run again.
"""

from __future__ import annotations

import difflib
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

ACTIONS = ("kill", "stop", "term", "restart", "slow", "hang", "partition", "kill_lighthouse")
STEP_PHASES = (
    *("before_step", "forward", "backward", "mirror", "vote", "optimizer", "after_commit"),
    "checkpoint",
)
"""Moments of the step that a fault names, in their order."""
BETWEEN_PHASES = ("recovery", "build", "join")
"""Moments between steps: the first at or after the step that a fault names."""
PHASES = (*STEP_PHASES, *BETWEEN_PHASES)

LIGHTHOUSE_SECONDS = 1.0
"""How long a killed lighthouse is away if its fault does not say."""

_KEYS = ("domain", "step", "phase", "rank")
_DURATION = {
    "stop": "for",
    "hang": "for",
    "partition": "for",
    "restart": "after",
    "kill_lighthouse": "after",
}
"""The key of ``Fault.seconds``, by action."""
_ALL_KEYS = (*_KEYS, "for", "after", "factor")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")

_RANDOM_KEYS = ("seed", "mtbf_steps", "actions", "copies", "after", "factor")
_LASTING = ("kill", "term")
_AWAY = ("stop", "restart", "hang", "partition")
_DRAWN_PHASES = STEP_PHASES[:7]
"""Every step has these; whether a checkpoint is saved in it is not known here."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what happens, where and when."""

    action: str
    domain: str
    step: int
    phase: str
    rank: int | None = None
    """Rank inside the domain; None means all of them."""
    seconds: float | None = None
    """How long it lasts (``for``), or until what it took away is started again (``after``)."""
    factor: float | None = None
    """How many times slower the domain is from then on."""

    def __str__(self) -> str:
        text = f"{self.action}:domain={self.domain},step={self.step},phase={self.phase}"
        if self.rank is not None:
            text += f",rank={self.rank}"
        if self.seconds is not None:
            text += f",{_DURATION[self.action]}={_plain(self.seconds)}"
        if self.factor is not None:
            text += f",factor={_plain(self.factor)}"
        return text


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


def is_random(spec: str) -> bool:
    """Whether ``spec`` has to be drawn before it can be parsed."""
    return any(part.partition(":")[0].strip() == "random" for part in spec.split(";"))


def draw(spec: str, *, domains: Sequence[str], steps: int) -> str:
    """The schedule that ``random:seed=N,mtbf_steps=F,actions=A+B`` stands for, as text.

    The steps between faults are exponentially distributed around ``mtbf_steps``. Each time
    one to ``copies`` domains (1 unless given) are hit in the same phase of one step. At any time at
    least one domain is there: neither gone for good nor away. A domain that is stopped, hung, cut
    off or restarted counts as away for some steps (:func:`away_steps`), and is not hit meanwhile.

    Args:
        spec: it may also have ``copies``, ``after`` (seconds of restarts, stops, hangs and
            partitions; 5) and ``factor`` (of slow domains; 2).
        domains: names of those that may be hit.
        steps: of the run; no fault is later.

    Raises:
        ValueError: naming the part that is wrong.
    """
    values = _parse_random(spec)
    actions = values["actions"].split("+")
    for action in actions:
        _check_name("action", action, ACTIONS, spec)
    seed = _whole("seed", values["seed"], 0, spec)
    mtbf = _decimal("mtbf_steps", values["mtbf_steps"], spec)
    copies = _whole("copies", values.get("copies", "1"), 1, spec)
    after = _decimal("after", values.get("after", "5"), spec)
    factor = _decimal("factor", values.get("factor", "2"), spec, more_than=1.0)

    chance = random.Random(seed)
    back: dict[str, float] = dict.fromkeys(domains, 0.0)  # the step from which each is there
    faults: list[Fault] = []
    moment, step = 0.0, 0
    while True:
        moment += chance.expovariate(1.0 / mtbf)
        # What happens in one step must be borne at once: two draws never share one.
        step = max(step + 1, math.ceil(min(moment, steps + 1)))
        if step > steps:
            return ";".join(map(str, faults))
        phase = chance.choice(_DRAWN_PHASES)
        there = [name for name in domains if back[name] <= step]
        untouched = list(there)
        for _ in range(chance.randint(1, copies)):
            possible = [a for a in actions if len(there) > 1 or a not in (*_LASTING, *_AWAY)]
            if not possible or not untouched:
                break
            action = chance.choice(possible)
            # A domain that is hit harmlessly stays: the last one that is there is never taken.
            name = chance.choice(untouched)
            untouched.remove(name)
            if action in _LASTING:
                back[name] = math.inf
            elif action in _AWAY:
                back[name] = step + away_steps(after)
            if action in (*_LASTING, *_AWAY):
                there.remove(name)
            faults.append(
                Fault(
                    action,
                    name,
                    step,
                    phase,
                    seconds=after if action in _AWAY else None,
                    factor=factor if action == "slow" else None,
                )
            )


def away_steps(seconds: float) -> int:
    """Steps after which a domain that was away for ``seconds`` is taken to be back.

    A guess on the safe side for small jobs, whose steps take less than a second, and whose workers
    need several seconds to start and to be admitted.
    """
    return math.ceil(2 * seconds) + 10


class Schedule:
    """The faults of a run, and which of them have happened, as ``chaos`` events tell.

    A process that is started again must not meet what its domain met before: after
    :meth:`restarted` the text is what is still ahead.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults: list[tuple[Fault, set[int]]] = [(fault, set()) for fault in faults]
        """Each with the ranks that met it, in this life of their domain."""

    def happened(self, event: Mapping[str, Any]) -> bool:
        """Note a ``chaos`` event; False if another rank has reported the same fault before."""
        for fault, ranks in self._faults:
            if _is_of(event, fault) and event["rank"] not in ranks:
                ranks.add(event["rank"])
                return len(ranks) == 1
        return True

    def restarted(self, event: Mapping[str, Any]) -> None:
        """Drop what lies behind the domain that the fault of ``event`` ended."""
        self._faults = [
            (fault, ranks)
            for fault, ranks in self._faults
            if fault.domain != event["domain"] or not (ranks or _is_behind(fault, event))
        ]

    def __str__(self) -> str:
        return ";".join(str(fault) for fault, _ in self._faults)


def _is_of(event: Mapping[str, Any], fault: Fault) -> bool:
    same = (fault.action, fault.domain, fault.phase) == tuple(
        event[key] for key in ("action", "domain", "phase")
    )
    if fault.phase in BETWEEN_PHASES:  # the step of the event is the last complete one
        return same and fault.rank in (None, event["rank"]) and fault.step <= event["step"] + 1
    return same and fault.rank in (None, event["rank"]) and fault.step == event["step"]


def _is_behind(fault: Fault, event: Mapping[str, Any]) -> bool:
    """Whether the moment of ``fault`` has passed at ``event``. One between steps never has: what
    ends such a moment is the fault."""
    if fault.phase in BETWEEN_PHASES:
        return False
    if event["phase"] in BETWEEN_PHASES or fault.step != event["step"]:
        return bool(fault.step <= event["step"])
    return STEP_PHASES.index(fault.phase) <= STEP_PHASES.index(event["phase"])


def _parse_fault(text: str) -> Fault:
    if not text:
        raise ValueError("empty fault in the chaos specification (a ';' too many?)")
    action, colon, rest = text.partition(":")
    action = action.strip()
    if action == "random":
        raise ValueError(
            f"{text!r} must be drawn first: the launcher does, and prints the schedule"
        )
    if not colon:
        raise ValueError(f"{text!r} is not ACTION:key=value,...")
    _check_name("action", action, ACTIONS, text)
    values = _values(rest, _ALL_KEYS, text)
    duration = _DURATION.get(action)
    extra = [key for key in (duration, "factor" if action == "slow" else None) if key]
    for key in values:
        if key not in (*_KEYS, *extra):
            raise ValueError(
                f"{action} takes no {key!r} in {text!r}; it takes {', '.join((*_KEYS, *extra))}"
            )
    optional = extra if action == "kill_lighthouse" else []
    _check_present((*_KEYS[:3], *(key for key in extra if key not in optional)), values, text)
    _check_name("phase", values["phase"], PHASES, text)
    rank = _whole("rank", values["rank"], 0, text) if "rank" in values else None
    step = _whole("step", values["step"], 1, text)
    seconds = factor = None
    if duration in values:
        seconds = _decimal(duration, values[duration], text)
    if "factor" in values:
        factor = _decimal("factor", values["factor"], text, more_than=1.0)
    return Fault(action, values["domain"], step, values["phase"], rank, seconds, factor)


def _parse_random(spec: str) -> dict[str, str]:
    action, _, rest = spec.strip().partition(":")
    if action.strip() != "random" or ";" in spec:
        raise ValueError(f"only one 'random:...', and nothing beside it, can be drawn: {spec!r}")
    values = _values(rest, _RANDOM_KEYS, spec)
    _check_present(_RANDOM_KEYS[:3], values, spec)
    return values


def _values(text: str, valid: Sequence[str], whole: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals or not value:
            raise ValueError(f"{item.strip()!r} in {whole!r} is not key=value")
        _check_name("key", key, valid, whole)
        if key in values:
            raise ValueError(f"key {key!r} occurs twice in {whole!r}")
        values[key] = value
    return values


def _check_present(keys: Iterable[str], values: Mapping[str, str], text: str) -> None:
    missing = [key for key in keys if key not in values]
    if missing:
        raise ValueError(f"{text!r} lacks {', '.join(missing)}")


def _check_name(what: str, name: str, valid: Sequence[str], text: str) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid)}"
        raise ValueError(f"unknown {what} {name!r} in {text!r}; {hint}")


def _whole(what: str, value: str, least: int, text: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise ValueError(f"{what} must be a whole number from {least}, got {value!r} in {text!r}")
    return int(value)


def _decimal(what: str, value: str, text: str, more_than: float = 0.0) -> float:
    number = float(value) if _NUMBER.fullmatch(value) else math.nan
    if not more_than < number < math.inf:
        raise ValueError(
            f"{what} must be a number greater than {more_than:g}, got {value!r} in {text!r}"
        )
    return number


def _plain(number: float) -> str:
    """All digits, and no exponent."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")
