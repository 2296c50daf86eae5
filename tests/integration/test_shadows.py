"""Owner and shadow are the same, bit for bit, and so are the initial weights on any world."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from runs import CONFIG, ROOT, end, start
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.integration


def run_workers(folder: Path, *, domains: int, overlap: float, steps: int) -> list[dict]:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=5000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    port = lighthouse.address().rsplit(":", 1)[1]
    script = str(ROOT / "tests" / "integration" / "shadow_worker.py")
    processes = [
        start(
            [
                sys.executable, script, str(CONFIG),
                "--fault_tolerance.domain", str(d), "--fault_tolerance.domains", str(domains),
                "--fault_tolerance.overlap", str(overlap), "--training.steps", str(steps),
                "--dump_folder", str(folder),
            ],
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
        )
        for d in range(domains)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=200)[0] for p in processes]
    finally:
        for process in processes:
            end(process)
        lighthouse.shutdown()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [
        json.loads(next(line for line in reversed(o.splitlines()) if line.startswith("{")))
        for o in outputs
    ]


def test_shadows_equal_their_owners_after_20_steps(tmp_path: Path) -> None:
    results = run_workers(tmp_path, domains=4, overlap=0.5, steps=20)
    for rank, result in enumerate(results):
        assert result["differing"] == []
        assert result["step"] == 20
        assert result["copies"] == 2
        assert result["names"] == ["model", "optimizer"]
        # 45 parameters, each with exp_avg, exp_avg_sq and step, of two owners
        assert result["compared"] == 2 * 45 * 4
        assert result["ft"] == [4, rank, 4]


def test_initial_weights_do_not_depend_on_the_world(tmp_path: Path) -> None:
    totals = [
        sum(r["weights"] for r in run_workers(tmp_path, domains=n, overlap=0.0, steps=0))
        for n in (1, 3)
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)
    assert abs(totals[0]) > 1.0
