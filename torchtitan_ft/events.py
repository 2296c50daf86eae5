"""The event file: one line of JSON per fact, written by several processes that may die at any time.

Floats keep full precision. JSON has no NaN or infinity, so they are written as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads back.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_START = '{"time": '
_BLOCK = 1 << 16


class EventLog:
    """Appends events to ``<dump_folder>/ft/events.jsonl``.

    Every event is one ``write`` to a descriptor in append mode, opened for it alone: lines of
    several processes do not interleave, and a SIGKILL leaves nothing in a buffer. There is no lock,
    as a stopped process that held it would stop everyone.

    Args:
        path: the file; its folder is made.
        domain: of the writing process.
        rank: of the writing process, inside its domain.
    """

    def __init__(self, path: str | Path, domain: str, rank: int) -> None:
        self.path = Path(path)
        self.domain = domain
        self.rank = rank
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, *, generation: int, step: int, **fields: Any) -> None:
        """Append one event. A full disk costs the event, not the training run."""
        record: dict[str, Any] = {
            "time": time.time(),
            "domain": self.domain,
            "rank": self.rank,
            "generation": generation,
            "step": step,
            "event": event,
        }
        taken = record.keys() & fields.keys()
        if taken:
            raise ValueError(f"event field {', '.join(sorted(taken))} is set by the log itself")
        record.update(fields)
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        try:
            if not self._append(line):
                logger.warning("Event %s of step %d was written in part only", event, step)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning("Event %s of step %d is lost: %s", event, step, error)

    def _append(self, line: bytes) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            # Whoever wrote last may have been cut short. Seeing another's write half done costs an
            # empty line, no more: the kernel lets writes through one at a time.
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The event in a line; None if the line is torn or empty."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    # A line cut short while another process was about to append is followed by that one's event.
    for start in (0, text.rfind(_START)):
        if start < 0:
            continue
        try:
            record = json.loads(text[start:])
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            return record
    return None


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All whole events of a file, in the order written; none if there is no file."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in data.split(b"\n") if (record := parse_line(line)) is not None]


def rotate(path: str | Path) -> Path | None:
    """Move the event file of an earlier run out of the way: to ``events.1.jsonl``, ``.2``, ...

    Returns:
        Its new place; None if there was no such file.
    """
    path = Path(path)
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target


def last_committed(path: str | Path) -> int | None:
    """The step of the newest ``step_committed`` event, found from the end of the file."""
    try:
        for line in _lines_from_end(Path(path)):
            if b'"step_committed"' in line:
                record = parse_line(line)
                if record is not None and record["event"] == "step_committed":
                    return int(record["step"])
    except FileNotFoundError:
        pass
    return None


def _lines_from_end(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        pieces: list[bytes] = []  # of the line whose beginning is not read yet, last piece first
        while position:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            first, *rest = file.read(size).split(b"\n")
            if rest:
                yield rest.pop() + b"".join(reversed(pieces))
                yield from reversed(rest)
                pieces = []
            pieces.append(first)
        yield b"".join(reversed(pieces))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
