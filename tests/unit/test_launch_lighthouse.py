"""The lighthouse's process: it is where it was, whatever happens to it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from torchtitan_ft.launch.lighthouse import Lighthouse, LighthouseError


@pytest.fixture
def lighthouse(tmp_path: Path) -> Iterator[Lighthouse]:
    lighthouse = start(tmp_path)
    yield lighthouse
    lighthouse.close()


def start(folder: Path, host: str = "127.0.0.1") -> Lighthouse:
    return Lighthouse(
        host,
        heartbeat_timeout_ms=500,
        join_timeout_ms=500,
        environment=os.environ,
        log=folder / "lighthouse.log",
    )


def answers(lighthouse: Lighthouse) -> bool:
    url = urlsplit(lighthouse.address)
    try:
        socket.create_connection((str(url.hostname), url.port or 0), timeout=1).close()
    except OSError:
        return False
    return True


def tend(lighthouse: Lighthouse, until: Callable[[], bool]) -> list[str]:
    said = []
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline
        if (message := lighthouse.tend()) is not None:
            said.append(message)
        time.sleep(0.02)
    return said


def test_killed_it_is_away_and_comes_back(lighthouse: Lighthouse) -> None:
    assert answers(lighthouse)
    assert lighthouse.tend() is None
    pid = lighthouse.pid
    began = time.monotonic()
    lighthouse.kill(0.3)
    assert not answers(lighthouse)
    said = tend(lighthouse, until=lambda: answers(lighthouse))
    assert time.monotonic() - began > 0.3
    assert said == [f"the lighthouse is started again at {lighthouse.address}"]
    assert lighthouse.pid != pid


def test_when_it_dies_it_is_started_again(lighthouse: Lighthouse) -> None:
    os.kill(lighthouse.pid, signal.SIGKILL)
    os.waitid(os.P_PID, lighthouse.pid, os.WEXITED | os.WNOWAIT)
    said = tend(lighthouse, until=lambda: answers(lighthouse))
    assert said[0] == "the lighthouse has ended (status -9); it is started again"


def test_one_that_cannot_be_there_is_given_up(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_ft.launch.lighthouse._AGAIN_SECONDS", 0.0)
    lighthouse.kill(0)
    url = urlsplit(lighthouse.address)
    with socket.create_server((str(url.hostname), url.port or 0)):
        said: list[str] = []
        deadline = time.monotonic() + 20
        while not (said and "not started any more" in said[-1]):
            assert time.monotonic() < deadline
            said += filter(None, [lighthouse.tend()])
            time.sleep(0.02)
    assert lighthouse.tend() is None


def test_an_address_of_another_machine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LighthouseError, match=r"no free port at 192\.0\.2\.199"):
        start(tmp_path, "192.0.2.199")


def test_it_starts_without_torch_and_ends_with_its_input() -> None:
    code = """
import sys
from torchtitan_ft.launch import lighthouse
exit = lighthouse.os._exit
lighthouse.os._exit = lambda status: exit("torch" in sys.modules)
lighthouse.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, "--bind", "127.0.0.1:0"]
    command += ["--heartbeat-timeout-ms", "500", "--join-timeout-ms", "500"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(10) == 0
