"""A torchft lighthouse as the witness (torchft 0.2), without torchft's Manager and process groups.

Its quorum is only a *proposal*: a timed-out request is not withdrawn, so members may get different
views, with ghosts in them. It restarts its numbers at 1 when it restarts; ours are in
``formation.py``. It pushes no notice, so those who ask to be admitted are read from its status page.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

from torchft.coordination import LighthouseClient, LighthouseServer, ManagerServer

from ..config import FaultToleranceConfig
from .formation import Candidate
from .witness import MembershipError, Proposal

_HEARTBEAT_LINE = re.compile(r"(\S+): seen ([0-9.]+)s ago")
"""In the status page of torchft 0.2; ``tests/integration/test_membership.py`` breaks when it changes."""
_PAGE_SECONDS = 2.0


class LighthouseWitness:
    """See :class:`witness.Witness`.

    Args:
        config: the ``[fault_tolerance]`` table.
        process: id of this process.
        host: address of this machine.
        ranks: of the domain.

    Raises:
        MembershipError: if no lighthouse answers.
    """

    arbiter = False

    def __init__(self, config: FaultToleranceConfig, process: str, host: str, ranks: int) -> None:
        self._process = process
        self._host = host
        self._ranks = ranks
        self._bounds = config.bounds
        self._lock = threading.Lock()
        address = os.environ.get("TORCHFT_LIGHTHOUSE")
        self.alone = not address
        """Whether nobody else can find the lighthouse: plain torchrun of one domain has its own, so
        that there is one way of working."""
        self._own: LighthouseServer | None = None
        if not address:
            self._own = LighthouseServer(
                bind="127.0.0.1:0",
                min_replicas=1,
                join_timeout_ms=int(1000 * config.bounds.late),
                quorum_tick_ms=20,
                heartbeat_timeout_ms=int(1000 * config.bounds.failure),
            )
            address = f"http://127.0.0.1:{_port(self._own.address())}"
        self._url = address
        try:
            self._client = LighthouseClient(
                address, timedelta(seconds=min(10.0, config.start_timeout_seconds))
            )
            self._beat()
        except (RuntimeError, TimeoutError) as error:
            raise MembershipError(f"no lighthouse answers at {address}: {error}") from error

    def _beat(self) -> None:
        # Heartbeats from a Python thread starve under the GIL; this server's come from Rust. It also
        # answers the other domains' pings.
        self._heart: ManagerServer | None = ManagerServer(
            replica_id=self._process,
            lighthouse_addr=self._url,
            hostname=self._host,
            bind=f"{self._host}:0",
            store_addr="",
            world_size=self._ranks,
            heartbeat_interval=timedelta(seconds=self._bounds.heartbeat),
            connect_timeout=timedelta(seconds=10),
            quorum_retries=0,
        )
        self.address = f"{self._host}:{_port(self._heart.address())}"

    def propose(self, me: Candidate, seconds: float) -> Proposal | str:
        try:
            with self._lock:
                if self._heart is None:
                    self._beat()
            quorum = self._client.quorum(
                self._process,
                timedelta(seconds=max(0.05, seconds)),
                address=self.address,
                store_address=me.store_address,
                step=0,
                world_size=self._ranks,
                shrink_only=False,
                data=replace(me, address=self.address).to_json(),
            )
        except TimeoutError:
            return "the lighthouse to find enough domains"
        except RuntimeError as error:
            return f"the lighthouse ({error})"
        if self._process not in (m.replica_id for m in quorum.participants):
            return "the lighthouse to count this domain in"
        return Proposal(
            int(quorum.quorum_id), [Candidate.from_json(m.data) for m in quorum.participants]
        )

    def settle(self, generation: int, ids: Sequence[str]) -> bool:
        return True

    def asking(self) -> frozenset[str]:
        with urllib.request.urlopen(f"{self._url}/status", timeout=_PAGE_SECONDS) as page:
            text = page.read().decode(errors="replace")
        return frozenset(
            process
            for process, age in _HEARTBEAT_LINE.findall(text)
            if float(age) < self._bounds.failure and process.count("|") == 3
        )

    def expel(self, process: str) -> None:
        pass  # it has no call for that: it waits for the heartbeats to stop

    def mute(self) -> None:
        with self._lock:
            if self._heart is not None:
                self._heart.shutdown()
                self._heart = None

    def close(self) -> None:
        self.mute()
        if self._own is not None:
            self._own.shutdown()

    def ports(self) -> set[int]:
        return {_port(self._url), _port(self.address)}

    @staticmethod
    def host(config: FaultToleranceConfig) -> str:
        """The address of this machine on the interface that leads to the lighthouse."""
        return address_towards(os.environ.get("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1"))


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def address_towards(url: str) -> str:
    """The address of this machine on the interface that leads to ``url``; sends nothing."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise MembershipError(f"TORCHFT_LIGHTHOUSE must look like http://host:port, got {url!r}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MembershipError(f"cannot find the way to the lighthouse at {url}: {error}") from error
