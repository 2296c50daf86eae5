"""The launcher with a stand-in for the worker: what is started, shown, ended and reported."""

import os
import pty
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from torchtitan_ft.launch import processes
from torchtitan_ft.launch.chaos import parse
from torchtitan_ft.launch.launcher import Job, LaunchError, last_errors

LAUNCH = """
import os, sys
from pathlib import Path
from torchtitan_ft.launch.launcher import Job, launch
if "FAKE_USER" in os.environ:
    os.geteuid = lambda: int(os.environ["FAKE_USER"])
job = Job(config=Path(sys.argv[1]), domains=int(sys.argv[2]), chaos=os.environ["FAKE_CHAOS"],
          live=len(sys.argv) > 3, worker="launch_fake_worker")
sys.exit(launch(job))
"""
TREE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth = int(sys.argv[2])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], str(depth - 1)],
                     start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


class Run:
    """A launcher process with its surroundings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "job.toml"
        self.config.write_text("")
        # Of the test, in every process below: what is left is found whoever started it.
        self.tag = secrets.token_hex(8)

    def start(
        self,
        fake: str,
        domains: int = 2,
        *arguments: str,
        stdout: int = subprocess.PIPE,
        chaos: str = "",
        **more: str,
    ) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if k != "TORCHFT_LIGHTHOUSE"}
        environment |= {
            **more,
            "FAKE": fake,
            "FAKE_CHAOS": chaos,
            "FAKE_FOLDER": str(self.folder),
            "FAKE_TAG": self.tag,
            "PYTHONPATH": str(Path(__file__).parent),
        }
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(self.config), str(domains), *arguments],
            env=environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAKE_TAG") == self.tag:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def network_left(self) -> list[str]:
        """What remains of the network of the domain that noted its namespace."""
        prefix = self.read("namespace-0").strip()[:9]
        assert len(prefix) == 9
        names = [p.name for f in ("/run/netns", "/sys/class/net") for p in Path(f).iterdir()]
        return [name for name in names if name.startswith(prefix)]

    def wait_until_hanging(self, *domains: int) -> None:
        files = [self.folder / f"hanging-{d}" for d in domains]
        deadline = time.monotonic() + 60
        while not all(f.exists() for f in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.left():
            assert time.monotonic() < deadline, self.left()
            time.sleep(0.05)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for process in run.left():
        process.kill()


def test_a_finished_run(run: Run) -> None:
    launcher = run.start("finish,quiet")
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert not run.left()
    lines = out.splitlines()
    assert "[0] [titan] root - INFO - here is domain 0" in lines
    assert "[1] [titan] root - INFO - here is domain 1" not in lines
    assert "[1] [titan] root - WARNING - domain 1 warns" in lines
    assert "[launch] generation 1 formed after step 0: domains 0, 1; 1 copy" in lines
    assert "[launch] finished at step 1" in lines
    log = (run.folder / "ft" / "logs" / "domain-1.log").read_text()
    assert "here is domain 1" in log


def test_a_dead_domain_does_not_fail_the_run(run: Run) -> None:
    launcher = run.start("finish,die")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert not run.left()


def test_a_failed_run_says_what_happened(run: Run) -> None:
    launcher = run.start("die,raise,quiet", 3)
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "the run did not complete; no step was committed" in errors
    assert "domain 0: killed by SIGKILL" in errors
    assert "domain 1: exit status 1" in errors
    assert "    ValueError: the moon is full" in errors
    assert "domain 2: exit status 0" in errors
    assert "ChildFailedError" not in out
    assert not run.left()


def test_the_summary_of_an_earlier_run_does_not_count(run: Run) -> None:
    assert run.start("finish", 1).wait(60) == 0
    assert run.start("quiet", 1).wait(60) == 1


FAULTS = (
    "kill_lighthouse:domain=0,step=1,phase=vote,after=0.5;"
    "kill:domain=0,step=9,phase=vote;"
    "hang:domain=1,step=1,phase=forward,for=9;"
    "restart:domain=1,step=2,phase=vote,after=0.2;"
    "kill:domain=1,step=2,phase=recovery;"
    "stop:domain=2,step=1,phase=vote,for=0.5"
)


def test_the_launchers_part_of_faults(run: Run) -> None:
    launcher = run.start("chaos,chaos,chaos", 3, chaos=FAULTS)
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, (out, errors)
    assert not run.left()
    # Restart: the same arguments without the faults that are behind it; the log goes on.
    first, second = run.read("arguments-1").splitlines()
    assert FAULTS in first
    kept = [f for f in FAULTS.split(";") if "domain=1" not in f or "recovery" in f]
    assert second == first.replace(FAULTS, ";".join(kept))
    assert run.read("ft/logs/domain-1.log").count("here is domain 1") == 2
    assert "[launch] domain 1 is to be started again in 0.2 s" in out
    # Stop: continued when due.
    assert 0.4 < float(run.read("stopped")) < 5
    assert "[launch] rank 0 of domain 2 is continued" in out
    # The lighthouse: away for as long as it was to be, then at the same address.
    assert 0.4 < float(run.read("lighthouse")) < 5
    assert out.count("[launch] the lighthouse is started again at http://127.0.0.1:") == 1


def test_a_drawn_schedule_is_shown_and_passed_on(run: Run) -> None:
    launcher = run.start("finish", 1, chaos="random:seed=1,mtbf_steps=0.5,actions=hang+slow")
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    (drawn,) = [line for line in out.splitlines() if "drawn: " in line]
    spec = drawn.partition("--chaos ")[2].strip("'")
    assert len(parse(spec)) == 2
    assert f"--fault_tolerance.chaos {spec}" in run.read("arguments-0")


@needs_root
def test_a_partition_cuts_a_domain_off(run: Run) -> None:
    chaos = "partition:domain=0,step=1,phase=vote,for=1;slow:domain=1,step=1,phase=vote,factor=2"
    launcher = run.start("chaos,chaos", chaos=chaos)
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, (out, errors)
    assert 0.9 < float(run.read("cut")) < 10
    assert "[launch] domain 0 is connected again" in out
    assert not run.left()
    assert run.network_left() == []


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_network_is_left_behind(run: Run, number: signal.Signals) -> None:
    launcher = run.start("hang", 1, chaos="partition:domain=0,step=9,phase=vote,for=1")
    run.wait_until_hanging(0)
    assert len(run.network_left()) == 3
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    run.wait_until_gone(processes.GRACE_SECONDS + 5)
    assert run.network_left() == []


def test_a_partition_needs_root(run: Run) -> None:
    chaos = "partition:domain=0,step=1,phase=vote,for=1"
    launcher = run.start("finish", 1, chaos=chaos, FAKE_USER="1000")
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert (out, errors.count("\n")) == ("", 1)
    assert errors.startswith("torchtitan-ft: --chaos: partition cannot be injected: network names")
    launcher = run.start("finish", 1, chaos=chaos, TORCHFT_LIGHTHOUSE="http://127.0.0.1:1")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert "partition needs a lighthouse of the launcher's own" in errors


def test_a_bad_configuration_is_one_clear_error(run: Run) -> None:
    launcher = run.start("bad")
    out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert (out, errors) == ("", "torchtitan-ft: trainnig: no such section\n")
    assert not (run.folder / "ft").exists()
    assert not run.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(run: Run, number: signal.Signals) -> None:
    launcher = run.start("hang")
    run.wait_until_hanging(0, 1)
    began = time.monotonic()
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert time.monotonic() - began < 10
    assert not run.left()


def test_a_second_signal_waits_for_nobody(run: Run) -> None:
    launcher = run.start("hang", 1)
    run.wait_until_hanging(0)
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert time.monotonic() - began < processes.GRACE_SECONDS - 1


def test_a_killed_launcher_leaves_nothing_behind(run: Run) -> None:
    launcher = run.start("hang")
    run.wait_until_hanging(0, 1)
    assert len(run.left()) >= 6
    launcher.kill()
    launcher.communicate(timeout=30)
    run.wait_until_gone(processes.GRACE_SECONDS + 5)


def test_a_blocked_console_blocks_no_worker_and_no_signal(run: Run) -> None:
    launcher = run.start("flood,hang")
    # Nobody reads the pipe: far more than it holds is written, and is in the log file all the same.
    log = run.folder / "ft" / "logs" / "domain-0.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and b"line 199999" in log.read_bytes()[-4096:]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.wait_until_hanging(1)
    launcher.send_signal(signal.SIGINT)
    # Gone within bounds, with the pipe still full.
    assert launcher.wait(20) == 130
    run.wait_until_gone(10)
    launcher.communicate()


def test_a_reader_that_leaves_does_not_fail_the_run(run: Run) -> None:
    launcher = run.start("finish", 1)
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(60) == 0


def test_on_a_terminal_there_is_a_table(run: Run) -> None:
    ours, theirs = pty.openpty()
    launcher = run.start("finish,quiet", 2, "live", stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert launcher.wait(60) == 0
    assert b"step time" in shown
    assert b"2.5000" in shown
    assert b"finished" in shown


def test_end_reaches_a_tree_that_ignores_sigterm() -> None:
    mark = secrets.token_hex(8)
    root = subprocess.Popen(
        [sys.executable, "-c", TREE, TREE, "2"],
        env={**os.environ, processes.MARK: f"{mark}/0"},
        stdout=subprocess.PIPE,
    )
    assert root.stdout is not None
    for _ in range(3):
        assert root.stdout.readline() == b"up\n"
    # Its root is gone: nothing but the mark leads to the others.
    root.kill()
    root.wait()
    assert len(processes.marked(mark)) == len(processes.marked(f"{mark}/0")) == 2
    assert processes.marked(f"{mark}/1") == []
    began = time.monotonic()
    assert processes.end(lambda: processes.marked(mark), grace=0.5)
    assert 0.4 < time.monotonic() - began < 3
    assert processes.marked(mark) == []
    root.stdout.close()


def test_what_is_stopped_ends_and_resumes() -> None:
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
        env={**os.environ, processes.MARK: f"{mark}/0", "LOCAL_RANK": "1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert not processes.resume(f"{mark}/0", 1)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert not processes.resume(f"{mark}/0", 0)
    assert processes.resume(f"{mark}/0", 1)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert processes.end(lambda: processes.marked(mark))
    assert time.monotonic() - began < 3
    assert process.wait() == -signal.SIGTERM
    process.stdout.close()


def test_a_job_is_checked_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.touch()
    fault = "kill:domain=2,step=1,phase=vote"
    Job(config=config, domains=3, chaos=fault).check()
    for job, message in (
        (Job(config=tmp_path / "none.toml"), "no configuration file"),
        (Job(config=config, domains=0), "--domains must be at least 1"),
        (Job(config=config, nproc_per_domain=0), "--nproc-per-domain must be at least 1"),
        (Job(config=config, domains=2, chaos=fault), "there is no domain '2'"),
        (Job(config=config, domains=3, chaos=fault + ",rank=1"), "has 1 ranks"),
        (Job(config=config, chaos="kill"), "--chaos: 'kill' is not"),
        (Job(config=config, chaos="random:seed=1"), "--chaos: 'random:seed=1' lacks mtbf_steps"),
        (Job(config=config, overrides=("--fault_tolerance.chaos=",)), "give faults with --chaos"),
    ):
        with pytest.raises(LaunchError, match=message):
            job.check()


def test_worker_arguments() -> None:
    job = Job(config=Path("a.toml"), domains=2, chaos="x", overrides=("--training.steps", "3"))
    assert " ".join(job.arguments("1")) == (
        "--config a.toml --fault_tolerance.domain 1 --fault_tolerance.domains 2 "
        "--fault_tolerance.chaos x --training.steps 3"
    )
    assert " ".join(replace(job, chaos="random:x").arguments("1")) == (
        "--config a.toml --fault_tolerance.domain 1 --fault_tolerance.domains 2 --training.steps 3"
    )
    assert job.arguments("1", chaos_left="")[6:8] == ["--fault_tolerance.chaos", ""]


def test_last_errors_leave_torchruns_report_out() -> None:
    log = """W1201 05:00:00.1 10 torch/distributed/run.py:800] note
[titan] root - INFO - fine
[titan] root - WARNING - careful
[titan] root - ERROR - domain 0 could not join a generation in time
E1201 05:00:01.2 10 torch/distributed/elastic/multiprocessing/api.py:900] failed (exitcode: 1)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert last_errors(log) == [
        "[titan] root - ERROR - domain 0 could not join a generation in time"
    ]
    assert last_errors("one\n\ntwo\n") == ["one", "two"]
