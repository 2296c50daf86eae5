"""Networks of domains: apart from the host's, cut and healed, and gone at the end."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_ft.launch.network import Network, NetworkError, check, remove

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)

SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    server.accept()[0].close()
"""
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=0.5)"


@pytest.fixture
def mark() -> Iterator[str]:
    mark = secrets.token_hex(8)
    yield mark
    remove(mark)


def left(mark: str) -> list[str]:
    names = [p.name for f in ("/run/netns", "/sys/class/net") for p in Path(f).iterdir()]
    return [name for name in names if name.startswith(f"tft{mark[:6]}")]


def test_domains_reach_each_other_but_while_they_are_cut(mark: str) -> None:
    network = Network(mark, ["a", "b"])
    assert sorted(left(mark)) == [f"tft{mark[:6]}{end}" for end in ("b", "n0", "n1", "v0", "v1")]
    b = network.address.removesuffix("1") + "3"

    def reaches(address: str) -> bool:
        command = [*network.command("a"), sys.executable, "-c", PROBE, address]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

    server = subprocess.Popen(
        [*network.command("b"), sys.executable, "-c", SERVER], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        assert reaches(b)
        network.cut("b")
        assert not reaches(b)
        network.heal("b")
        assert reaches(b)
        # A process inside does not keep it.
        assert network.close()
    finally:
        server.kill()
        server.communicate()
    assert left(mark) == []


def test_two_networks_are_apart(mark: str) -> None:
    other = secrets.token_hex(8)
    first = Network(mark, ["0"])
    try:
        assert Network(other, ["0"]).address != first.address
    finally:
        remove(other)
    assert len(left(mark)) == 3


def test_one_that_cannot_be_made_leaves_nothing(mark: str) -> None:
    with pytest.raises(NetworkError, match="File exists"):
        Network(mark, ["0", "0"])
    assert left(mark) == []
    with pytest.raises(NetworkError, match="at most 250"):
        Network(mark, [str(i) for i in range(251)])


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="need root"):
        check()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NetworkError, match="command 'ip'"):
        check()
