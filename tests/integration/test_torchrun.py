"""Plain torchrun, without the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import CONFIG, Run, end, start

pytestmark = pytest.mark.integration


def test_one_domain_of_two_ranks(tmp_path: Path) -> None:
    process = start(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "train.py", "--config", str(CONFIG),
            "--training.steps", "3", "--dump_folder", str(tmp_path),
            "--metrics.enable_tensorboard",
        ]
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        end(process)
    run = Run(process.returncode, output, tmp_path, 0.0)
    assert run.exit_code == 0, output[-4000:]
    assert run.summary["steps"] == 3
    assert sorted(run.losses) == [1, 2, 3]
    (formed,) = run.of("generation_formed")
    assert (formed["domains"], formed["copies"]) == (["0"], 0)
    assert "step:  3" in output  # torchtitan's own line
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))


def test_bad_config_is_one_line_and_code_2(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[trainig]\n')
    process = start([sys.executable, "train.py", "--config", str(file)])
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    (line,) = [x for x in output.splitlines() if x.startswith("torchtitan-ft:")]
    assert str(file) in line
    assert "'trainig'" in line
    assert "did you mean 'training'" in line
    assert "Traceback" not in output
