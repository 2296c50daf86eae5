"""How long a recovery takes: real runs, one SIGKILL each, median and maximum by stage.

    python scripts/benchmarks/recovery_time.py [--kills 10] [--domains 4]

Seconds run from the kill, as the dying process wrote it down, to the moment the survivors have state,
shadows and process groups again and begin the step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torchtitan_ft.events import read_events

ROOT = Path(__file__).parents[2]
STAGES = ("seconds_quorum", "seconds_build", "seconds_restore")
PHASES = ("before_step", "forward", "backward", "mirror", "vote", "optimizer", "after_commit")


def run(
    folder: Path, *, domains: int, faults: list[tuple[int, int, str]], steps: int
) -> list[dict]:
    """One job with ``faults`` (domain, step, phase); a row of seconds for each recovery."""
    chaos = ";".join(f"kill:domain={d},step={s},phase={p}" for d, s, p in faults)
    subprocess.run(
        [
            sys.executable, "-m", "torchtitan_ft.cli", "launch", "--no-live",
            "--config", str(ROOT / "train_configs" / "llama3_debug_ft.toml"),
            "--domains", str(domains), "--chaos", chaos,
            "--", "--dump_folder", str(folder), "--training.steps", str(steps),
        ],
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    events = read_events(folder / "ft" / "events.jsonl")
    rows = []
    for recovered in (e for e in events if e["event"] == "recovered"):
        killed = max(
            e["time"] for e in events if e["event"] == "chaos" and e["time"] < recovered["time"]
        )
        row = {stage: recovered[stage] for stage in STAGES}
        total = recovered["time"] - killed
        rows.append({"seconds_detect": total - sum(row.values()), **row, "seconds_total": total})
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--domains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    rows: list[dict] = []
    while len(rows) < options.kills:
        # Two kills a run, far enough apart to be two recoveries.
        victims = choose.sample(range(options.domains), 2)
        faults = [(d, s, choose.choice(PHASES)) for d, s in zip(victims, (4, 9), strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            rows += run(Path(folder), domains=options.domains, faults=faults, steps=12)
        print(f"{len(rows)} kills", file=sys.stderr, flush=True)
    print(f"{len(rows)} kills, {options.domains} domains, seconds:")
    for key in rows[0]:
        values = [row[key] for row in rows]
        print(f"  {key:16s} median {statistics.median(values):6.3f}   max {max(values):6.3f}")


if __name__ == "__main__":
    main()
