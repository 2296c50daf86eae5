"""Real runs for the integration tests: real processes, real SIGKILLs, real event files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torchtitan_ft.events import read_events

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "train_configs" / "llama3_debug_ft.toml"


@dataclass
class Run:
    """What is left of a finished run."""

    exit_code: int
    output: str
    folder: Path
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder / "ft" / "events.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "ft" / "summary.json").read_text())

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def losses(self) -> dict[int, float]:
        return {e["step"]: e["loss"] for e in self.of("step_committed")}


def launch(
    folder: Path,
    *,
    domains: int = 4,
    ranks: int = 1,
    chaos: str = "",
    overrides: tuple[str, ...] = (),
    timeout: float = 240,
) -> Run:
    """``torchtitan-ft launch`` of the debug job, to its end."""
    command = [sys.executable, "-m", "torchtitan_ft.cli", "launch", "--config", str(CONFIG)]
    command += ["--domains", str(domains), "--nproc-per-domain", str(ranks)]
    if chaos:
        command += ["--chaos", chaos]
    command += ["--", "--dump_folder", str(folder), *overrides]
    began = time.monotonic()
    process = start(command)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        left = end(process)
    assert not left, f"processes left behind: {left}"
    return Run(process.returncode, output, folder, time.monotonic() - began)


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """A command in its own session, from the root of the checkout, with one thread a process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def workers(folder: Path) -> list[psutil.Process]:
    """Processes that work on the run in ``folder``, whoever their parent is."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in (process.info["cmdline"] or []):
            found.append(process)
    return found


def end(process: subprocess.Popen[str]) -> list[int]:
    """Make sure nothing of ``process``'s session runs on; returns what was still there."""
    left = []
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid and other.pid != process.pid:
                left.append(other.pid)
                other.kill()
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left
