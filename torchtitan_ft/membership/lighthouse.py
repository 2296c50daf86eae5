"""Who is alive: a torchft lighthouse proposes, the members acknowledge.

The lighthouse (torchft 0.2) is used on its own, without torchft's Manager or its process groups.
Its quorum is only a *proposal*: a timed-out request is not withdrawn, so members may get different
views, with ghosts in them. A generation exists once every member has acknowledged the same view, by
content, on the store of its first member, within a deadline; otherwise everyone asks again with a
higher number. Numbers are ours: the lighthouse restarts its own at 1 when it restarts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import time
import uuid
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torchft.coordination import LighthouseClient, LighthouseServer, ManagerServer, Quorum

from ..config import FaultToleranceConfig
from .world import World

logger = logging.getLogger(__name__)

_HEARTBEAT = timedelta(milliseconds=100)
_ACKNOWLEDGE_SECONDS = 3.0
"""A member that answered the lighthouse needs milliseconds; a ghost never answers."""
_ASK_AGAIN_SECONDS = 0.1


class MembershipError(RuntimeError):
    """No generation could be formed within the bounds the user has set."""


class Membership:
    """The part one process plays in forming generations. One object for the life of the process.

    The first rank of a domain (its leader) speaks to the lighthouse; the other ranks check in with
    it through torchrun's store, so that a domain that lost a rank does not come back as a whole.

    Args:
        config: the ``[fault_tolerance]`` table.
        outer: see :class:`World`.

    Raises:
        MembershipError: if the lighthouse cannot be reached.
    """

    def __init__(self, config: FaultToleranceConfig, *, outer: int = 1) -> None:
        self._config = config
        self._outer = outer
        self.local_rank = int(os.environ.get("RANK", "0"))
        self.ranks_per_domain = int(os.environ.get("WORLD_SIZE", "1"))
        self._round = 0
        self._attempted = 0
        self._domain_store: dist.Store | None = None
        if self.ranks_per_domain > 1:
            timeout = timedelta(seconds=config.start_timeout_seconds)
            self._domain_store = next(dist.rendezvous("env://", timeout=timeout))[0]
        self._domains = config.domains
        self._own_lighthouse: LighthouseServer | None = None
        self._ports: set[int] = set()
        if self.local_rank == 0:
            self._connect()

    def _connect(self) -> None:
        config = self._config
        address = os.environ.get("TORCHFT_LIGHTHOUSE")
        if not address:
            # Plain torchrun of one domain: its own lighthouse, so that there is one way of working.
            self._own_lighthouse = LighthouseServer(
                bind="127.0.0.1:0",
                min_replicas=1,
                join_timeout_ms=config.join_timeout_ms,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=config.heartbeat_timeout_ms,
            )
            address = f"http://127.0.0.1:{_port(self._own_lighthouse.address())}"
            self._domains = 1  # nobody else can find it
        self._host = _address_towards(address)
        # A fresh id per process: an earlier life of this domain must never be mistaken for it.
        self._replica_id = f"{config.domain}:{uuid.uuid4().hex[:8]}"
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        try:
            self._client = LighthouseClient(
                address, timedelta(seconds=min(10.0, config.start_timeout_seconds))
            )
            # Heartbeats from a Python thread starve under the GIL; this server's come from Rust.
            self._heart = ManagerServer(
                replica_id=self._replica_id,
                lighthouse_addr=address,
                hostname=self._host,
                bind=f"{self._host}:0",
                store_addr=f"{self._host}:{self._store.port}",
                world_size=self.ranks_per_domain,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=timedelta(seconds=10),
                quorum_retries=0,
            )
        except (RuntimeError, TimeoutError) as error:
            raise MembershipError(f"no lighthouse answers at {address}: {error}") from error
        self._ports = {_port(address), _port(self._heart.address()), self._store.port}

    def join(self, report: Any) -> World:
        """Form the next generation; blocks until it exists.

        Args:
            report: what this rank has to tell all others, of JSON types; see ``World.reports``.

        Raises:
            MembershipError: if a rank of this domain is gone, or no generation was formed within
                ``start_timeout_seconds`` (the first time) or ``rebuild_timeout_seconds``.
        """
        self._round += 1
        config = self._config
        first = self._round == 1
        limit = config.start_timeout_seconds if first else config.rebuild_timeout_seconds
        deadline = time.monotonic() + limit
        if self.local_rank:
            return self._follow(report, deadline)
        world = self._lead(self._check_in(report, deadline), deadline)
        if self._domain_store is not None:
            self._domain_store.set(f"world/{self._round}", json.dumps(world.to_json()))
        return world

    def spare_ports(self, world: World) -> set[int]:
        """Ports of the connections that outlive a generation (not to be cut with its groups)."""
        ports = {*self._ports, _port(world.store_address)}
        if self._domain_store is not None:
            ports.add(int(os.environ["MASTER_PORT"]))
        return ports

    def leave(self) -> None:
        """Stop the heartbeats: the others need not wait for this domain."""
        if self.local_rank == 0:
            self._heart.shutdown()
            if self._own_lighthouse is not None:
                self._own_lighthouse.shutdown()

    # Inside the domain.

    def _check_in(self, report: Any, deadline: float) -> list[Any]:
        """The reports of all ranks of this domain."""
        ranks = [report]
        for rank in range(1, self.ranks_per_domain):
            assert self._domain_store is not None
            try:
                self._domain_store.wait([f"report/{self._round}/{rank}"], _until(deadline))
                ranks.append(json.loads(self._domain_store.get(f"report/{self._round}/{rank}")))
            except dist.DistError as error:
                raise MembershipError(
                    f"rank {rank} of domain {self._config.domain} is gone; the domain leaves"
                ) from error
        return ranks

    def _follow(self, report: Any, deadline: float) -> World:
        assert self._domain_store is not None
        try:
            self._domain_store.set(f"report/{self._round}/{self.local_rank}", json.dumps(report))
            # The leader needs up to the deadline itself, and says why when it fails.
            self._domain_store.wait([f"world/{self._round}"], _until(deadline + 5))
            text = self._domain_store.get(f"world/{self._round}")
        except dist.DistError as error:
            raise MembershipError(
                f"the first rank of domain {self._config.domain} is gone; the domain leaves"
            ) from error
        return World.from_json(json.loads(text), local_rank=self.local_rank)

    # Between domains; the leader only.

    def _lead(self, reports: list[Any], deadline: float) -> World:
        waiting_for, trouble, said = "the lighthouse", "", ""
        while time.monotonic() < deadline:
            try:
                quorum = self._client.quorum(
                    self._replica_id,
                    _until(deadline),
                    address=self._heart.address(),
                    store_address=f"{self._host}:{self._store.port}",
                    step=0,
                    world_size=self.ranks_per_domain,
                    shrink_only=False,
                    data={
                        "domain": self._config.domain,
                        "generation": self._attempted,
                        "reports": reports,
                    },
                )
            except (RuntimeError, TimeoutError) as error:
                trouble = f" (the lighthouse: {error})"
                time.sleep(_ASK_AGAIN_SECONDS)
                continue
            trouble = ""
            proposal = self._proposal(quorum)
            if proposal is None:
                waiting_for = "the lighthouse to count this domain in"
            elif isinstance(proposal, str):
                waiting_for = proposal
            elif self._acknowledged(proposal):
                return proposal
            else:
                waiting_for = f"domains {', '.join(proposal.domains)} to acknowledge"
            if waiting_for != said:
                logger.info("Domain %s waits for %s", self._config.domain, waiting_for)
                said = waiting_for
            time.sleep(_ASK_AGAIN_SECONDS)
        raise MembershipError(
            f"domain {self._config.domain} could not join a generation in time; "
            f"it waited for {waiting_for}{trouble}"
        )

    def _proposal(self, quorum: Quorum) -> World | str | None:
        """The world this quorum would make; None if we are not in it; text if it must wait."""
        members = sorted(
            quorum.participants, key=lambda m: (_natural(m.data["domain"]), m.replica_id)
        )
        ids = [m.replica_id for m in members]
        if self._replica_id not in ids:
            return None
        names = tuple(str(m.data["domain"]) for m in members)
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            return f"the earlier process of domain {', '.join(twice)} to be forgotten"
        sizes = {m.world_size for m in members}
        if len(sizes) > 1:
            raise MembershipError(
                "domains differ in size: {n: m.world_size for n, m in zip(names, members, strict=True)}"
            )
        generation = 1 + max(int(m.data["generation"]) for m in members)
        # Once all were there, a death before the first step must not make the others wait for it.
        if generation == 1 and len(members) < self._domains:
            return f"{self._domains} domains, {len(members)} here"
        self._attempted = generation
        return World(
            generation=generation,
            domains=names,
            ft_index=ids.index(self._replica_id),
            local_rank=0,
            ranks_per_domain=self.ranks_per_domain,
            outer=self._outer,
            store_address=members[0].store_address,
            reports=tuple(m.data["reports"] for m in members),
        )

    def _acknowledged(self, world: World) -> bool:
        """Whether every member saw this very world: same members, same reports, same number."""
        content = {**world.to_json(), "ft_index": None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        keys = [f"ack/{world.generation}/{digest}/{i}" for i in range(len(world.domains))]
        try:
            store = connect(world.store_address, _ACKNOWLEDGE_SECONDS)
            store.set(keys[world.ft_index], "1")
            store.wait(keys, timedelta(seconds=_ACKNOWLEDGE_SECONDS))
        except dist.DistError as error:
            logger.info("Generation %d not acknowledged by all: %s", world.generation, error)
            return False
        return True


def connect(address: str, seconds: float) -> dist.TCPStore:
    """A client of the store at host:port; raises ``torch.distributed.DistError`` when it is gone."""
    host, port = address.rsplit(":", 1)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.05, deadline - time.monotonic()))


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts domain "10" after "9"."""
    return [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    ]


def _address_towards(url: str) -> str:
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
