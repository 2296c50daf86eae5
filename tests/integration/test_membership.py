"""Generations formed by real processes with a real lighthouse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from runs import ROOT
from torchft.coordination import LighthouseServer

pytestmark = pytest.mark.integration


class Domain:
    """One process that plays a domain."""

    def __init__(self, lighthouse: str | None, **config: Any) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RUST_LOG": "error"}
        env.pop("TORCHFT_LIGHTHOUSE", None)
        if lighthouse:
            env["TORCHFT_LIGHTHOUSE"] = lighthouse
        script = str(ROOT / "tests" / "integration" / "membership_worker.py")
        config = {"failure_timeout_seconds": 0.5, "min_domains_timeout_seconds": 8.0, **config}
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def world(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def again(self, report: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(report) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=5000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


@pytest.fixture
def domains() -> Iterator[list[Domain]]:
    started: list[Domain] = []
    yield started
    for domain in started:
        domain.kill()


def worlds(domains: list[Domain]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(Domain.world, domains))


def test_generations_only_grow_and_all_agree(lighthouse: str, domains: list[Domain]) -> None:
    # Names out of order, one more than a digit long.
    domains += [Domain(lighthouse, domain=d, domains=4) for d in ("10", "2", "1", "0")]
    first = worlds(domains)
    assert {json.dumps({**w, "ft_index": None}) for w in first} == {
        json.dumps({**first[0], "ft_index": None})
    }
    assert first[0]["generation"] == 1
    assert first[0]["domains"] == ["0", "1", "2", "10"]
    assert [w["ft_index"] for w in first] == [3, 2, 1, 0]

    # The host of the store dies, then the next one; each time the others go on, with their reports.
    previous = 1
    for victim in (3, 2):
        domains[victim].kill()
        live = domains[:victim]
        began = time.monotonic()
        for i, domain in enumerate(live):
            domain.again({"i": i})
        after = worlds(live)
        assert time.monotonic() - began < 5
        assert len({w["generation"] for w in after}) == 1
        assert after[0]["generation"] > previous
        previous = after[0]["generation"]
        names = ["0", "1", "2", "10"][4 - len(live) :]
        assert after[0]["domains"] == names
        # by ft index, a list of ranks, each with what it reported
        assert after[0]["reports"] == [[[{"i": i}]] for i in reversed(range(len(live)))]


def test_start_waits_for_all_domains(lighthouse: str, domains: list[Domain]) -> None:
    domains.append(Domain(lighthouse, domain="0", domains=2))
    time.sleep(6)
    domains.append(Domain(lighthouse, domain="1", domains=2))
    assert worlds(domains)[0]["domains"] == ["0", "1"]


def test_start_without_the_others_ends_with_a_reason(
    lighthouse: str, domains: list[Domain]
) -> None:
    domains.append(Domain(lighthouse, domain="0", domains=2, start_timeout_seconds=2.0))
    error = domains[0].world()["error"]
    assert "2 domains, 1 here" in error


def test_no_lighthouse_ends_with_a_reason(domains: list[Domain]) -> None:
    domains.append(Domain("http://127.0.0.1:9", domain="0", start_timeout_seconds=2.0))
    assert "http://127.0.0.1:9" in domains[0].world()["error"]


def test_nonsense_address_ends_with_a_reason(domains: list[Domain]) -> None:
    domains.append(Domain("somewhere", domain="0"))
    assert "must look like http://host:port" in domains[0].world()["error"]


def test_alone_without_a_lighthouse(domains: list[Domain]) -> None:
    domains.append(Domain(None, domain="0", domains=4))
    world = domains[0].world()
    assert (world["generation"], world["domains"]) == (1, ["0"])


def test_late_domain_is_seen_while_the_others_go_on(lighthouse: str, domains: list[Domain]) -> None:
    """By the status page of the lighthouse, which is nobody's promise: this breaks when it changes."""
    domains += [Domain(lighthouse, domain=d, domains=2, watch=True) for d in ("0", "1")]
    first = worlds(domains[:2])
    domains.append(Domain(lighthouse, domain="2", domains=2))
    assert domains[0].world() == {"newcomers": ["2"]}
    for domain in domains[:2]:
        domain.again([])
    admitted = worlds(domains)
    assert {w["generation"] for w in admitted} == {first[0]["generation"] + 1}
    assert admitted[0]["domains"] == ["0", "1", "2"]
    assert admitted[0]["newcomers"] == ["2"]


def test_lighthouse_restarted_and_no_number_used_twice(domains: list[Domain]) -> None:
    server = Lighthouse(38987)
    address = "http://127.0.0.1:38987"
    try:
        domains += [Domain(address, domain=str(d), domains=3) for d in range(3)]
        assert {w["generation"] for w in worlds(domains)} == {1}
        server.kill()
        server = Lighthouse(38987)
        domains[1].kill()
        live = [domains[0], domains[2]]
        for domain in live:
            domain.again([])
        after = worlds(live)
        assert {w["generation"] for w in after} == {2}
        assert after[0]["domains"] == ["0", "2"]  # two of three: a majority needs no witness
        server.kill()
        server = Lighthouse(38987)
        domains[2].kill()
        domains[0].again([])
        # One of two, and the lighthouse has forgotten: the other might live on elsewhere.
        error = domains[0].world()["error"]
        assert "no majority" in error
    finally:
        server.kill()


class Lighthouse:
    """A lighthouse in a process of its own."""

    def __init__(self, port: int) -> None:
        code = (
            "import sys, time; from torchft.coordination import LighthouseServer as L\n"
            f"s = L(bind='127.0.0.1:{port}', min_replicas=1, join_timeout_ms=5000, "
            "quorum_tick_ms=20, heartbeat_timeout_ms=500); print('up', flush=True); time.sleep(600)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUST_LOG": "error"},
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_same_name_twice_is_not_a_world(lighthouse: str, domains: list[Domain]) -> None:
    domains += [
        Domain(lighthouse, domain="0", domains=2, start_timeout_seconds=5.0) for _ in range(2)
    ]
    errors = [w["error"] for w in worlds(domains)]
    assert all("domain 0 to be forgotten" in e for e in errors)
