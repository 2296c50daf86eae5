"""Losses noticed over real sockets, and the arithmetic of waiting."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from torchtitan_ft.config.bounds import Bounds, StepBound
from torchtitan_ft.membership.lobby import Lobby
from torchtitan_ft.membership.watch import Loss, Progress, Watch
from torchtitan_ft.stragglers import Stragglers

_SERVER = """
import time
from torchtitan_ft.launch.lighthouse import _extension
server = _extension().LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
print(server.address().rsplit(":", 1)[1], flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:  # holds the GIL nearly all the time
    pass
"""


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, f"127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()


class Watched:
    def __init__(self, peers: dict[str, str], silence: float = 0.5) -> None:
        self.losses: list[Loss] = []
        self.cuts: list[float] = []
        self.stuck: list[float] = []
        self.progress = Progress()
        self.watch = Watch(
            peers,
            silence=silence,
            patience=5.0,
            progress=self.progress,
            on_loss=self.losses.append,
            cut=lambda: self.cuts.append(time.monotonic()),
            on_stuck=lambda: self.stuck.append(time.monotonic()),
        )

    def wait(self, seconds: float) -> float:
        began = time.monotonic()
        while not self.cuts and time.monotonic() - began < seconds:
            time.sleep(0.01)
        return time.monotonic() - began


def test_busy_is_not_lost_dead_is_at_once(peer: tuple[subprocess.Popen[str], str]) -> None:
    process, address = peer
    watched = Watched({"1": address})
    watched.watch.start()
    time.sleep(1.5)
    assert watched.losses == []
    process.kill()
    assert watched.wait(2.0) < 0.5
    (loss,) = watched.losses
    assert (loss.domain, loss.dead) == ("1", True)
    watched.watch.stop()
    assert not watched.watch.is_alive()


def test_stopped_is_lost_after_the_silence(peer: tuple[subprocess.Popen[str], str]) -> None:
    process, address = peer
    watched = Watched({"1": address})
    watched.watch.start()
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    stopped = time.time()
    assert 0.4 < watched.wait(3.0) < 1.0  # within twice the bound
    (loss,) = watched.losses
    assert (loss.domain, loss.dead) == ("1", False)
    assert loss.last_alive == pytest.approx(stopped, abs=0.3)
    process.send_signal(signal.SIGCONT)
    watched.watch.stop()


def test_nobody_there_is_lost() -> None:
    watched = Watched({"1": "127.0.0.1:9"})
    watched.watch.start()
    assert watched.wait(2.0) < 1.0
    watched.watch.stop()


def test_no_progress_is_a_loss_and_a_stuck_main_thread_is_told() -> None:
    watched = Watched({}, silence=0.2)
    watched.watch.start()
    for _ in range(5):
        watched.progress.mark(0.3)
        time.sleep(0.1)
    assert watched.losses == []
    assert watched.wait(2.0) < 1.0
    assert watched.losses[0].domain is None
    time.sleep(0.6)
    assert len(watched.cuts) > 2  # again and again: new connections may have been made
    assert len(watched.stuck) == 1
    watched.watch.stop()


def test_the_lobby_outlives_a_witness_that_is_away() -> None:
    answers = iter([OSError("refused"), ("2",), ()])

    def look() -> tuple[str, ...]:
        answer = next(answers, ())
        if isinstance(answer, OSError):
            raise answer
        return answer

    lobby = Lobby(look)
    lobby.start()
    deadline = time.monotonic() + 5
    while not lobby.waiting and time.monotonic() < deadline:
        time.sleep(0.05)
    lobby.stop()
    assert lobby.waiting == ("2",)


@pytest.mark.parametrize("failure", [0.2, 0.5, 2.0, 30.0])
def test_bounds_never_contradict_each_other(failure: float) -> None:
    bounds = Bounds(failure)
    assert bounds.heartbeat * 3 < bounds.failure < bounds.late < bounds.rebuild
    assert bounds.failure < bounds.acknowledge < bounds.rebuild
    steps = StepBound(bounds, fixed=0.0, first=300.0)
    assert steps.of(first=True) == steps.of(first=False) == 300.0
    for _ in range(30):
        steps.measured(1.0)
    assert steps.of(first=False) == max(5.0, 4 * failure)
    assert steps.of(first=True) >= steps.of(first=False)
    for _ in range(20):
        steps.measured(60.0)
    assert steps.of(first=False) == 300.0
    assert StepBound(bounds, fixed=400.0, first=300.0).of(first=True) == 400.0


def test_a_straggler_is_named_once_in_a_while() -> None:
    slow = Stragglers(("0", "1", "2"))
    for _ in range(4):
        slow.measured([0.1, 0.3, 0.12], 1.0)
        assert slow.report() is None
    slow.measured([0.1, 0.3, 0.12], 1.0)
    found = slow.report()
    assert found is not None
    assert (found.domain, found.share) == ("1", 0.3)
    assert found.ratio == pytest.approx(0.3 / 0.11)
    slow.measured([0.1, 0.3, 0.12], 1.0)
    assert slow.report() is None


def test_even_work_and_small_differences_are_no_stragglers() -> None:
    even = Stragglers(("0", "1"))
    tiny = Stragglers(("0", "1"))
    for _ in range(6):
        even.measured([0.3, 0.32], 1.0)
        tiny.measured([0.001, 0.003], 1.0)
    assert even.report() is None
    assert tiny.report() is None
    alone = Stragglers(("0",))
    for _ in range(6):
        alone.measured([1.0], 1.0)
    assert alone.report() is None
