"""The part one process plays in forming generations."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import FaultToleranceConfig
from .formation import Candidate, Formation, Wait
from .lighthouse import LighthouseWitness
from .witness import MembershipError, Witness
from .world import World

logger = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 0.1
_LONGEST_ASK_SECONDS = 5.0
"""A request that the witness lost must not be waited for much longer."""
_REFUSED_SECONDS = 30.0
_RETIRED_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
_GLANCE_SECONDS = 0.2
_SEPARATOR = "|"
"""Between the parts of a process id; no domain name has it."""

__all__ = ["Membership", "MembershipError", "connect"]


class Membership:
    """One object for the life of the process.

    The first rank of a domain (its leader) speaks to the witness; the other ranks check in with it
    through torchrun's store, so that a domain that lost a rank does not come back as a whole.

    Args:
        config: the ``[fault_tolerance]`` table.
        outer: see :class:`World`.
        leaving: whether this process was asked to leave: it does not wait for its domain's other ranks.

    Raises:
        MembershipError: if the witness cannot be reached.
    """

    def __init__(
        self,
        config: FaultToleranceConfig,
        *,
        outer: int = 1,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._leaving = leaving
        self._bounds = config.bounds
        self._outer = outer
        self.domain = config.domain
        self.local_rank = int(os.environ.get("RANK", "0"))
        self.ranks_per_domain = int(os.environ.get("WORLD_SIZE", "1"))
        self._round = 0
        self._refused: dict[str, float] = {}
        self._members: frozenset[str] = frozenset()
        self._domain_store: dist.Store | None = None
        if self.ranks_per_domain > 1:
            timeout = timedelta(seconds=config.start_timeout_seconds)
            self._domain_store = next(dist.rendezvous("env://", timeout=timeout))[0]
        self._witness: Witness | None = None
        if self.local_rank == 0:
            self._connect()

    def _connect(self) -> None:
        config = self._config
        host = LighthouseWitness.host(config)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        # A fresh id per process: an earlier life of this domain must never be mistaken for it. Whoever
        # sees it can find out whether it can be reached.
        self._id = _SEPARATOR.join(
            (config.domain, uuid.uuid4().hex[:8], host, str(self._store.port))
        )
        witness = LighthouseWitness(config, self._id, host, self.ranks_per_domain)
        me = Candidate(
            id=self._id,
            domain=config.domain,
            ranks=self.ranks_per_domain,
            store_address=f"{host}:{self._store.port}",
            address=witness.address,
        )
        self._witness = witness
        self._formation = Formation(
            me,
            domains=1 if witness.alone else config.domains,
            min_domains=1 if witness.alone else config.min_domains,
            arbiter=witness.arbiter,
        )

    def join(self, report: Any, *, leaving: bool = False) -> World | None:
        """Form the next generation; blocks until it exists.

        Args:
            report: what this rank has to tell all others, of JSON types; see ``World.reports``.
            leaving: only say goodbye, so that the others need not wait.

        Returns:
            The generation; None if ``leaving``.

        Raises:
            MembershipError: if a rank of this domain is gone, or no generation was formed within
                ``start_timeout_seconds`` (the first time) or ``min_domains_timeout_seconds``.
        """
        self._round += 1
        if self.local_rank:
            return self._follow(report)
        reports = self._check_in(report)
        world = self._lead(reports, leaving)
        if world is not None:
            # Those that die or leave are heard of for a moment more.
            until = time.monotonic() + max(2 * self._bounds.failure, _RETIRED_SECONDS)
            self._refused.update(dict.fromkeys(self._members - set(world.ids), until))
            self._members = frozenset(world.ids)
        if self._domain_store is not None:
            self._domain_store.set(
                f"world/{self._round}", json.dumps(world.to_json() if world else None)
            )
        return world

    def newcomers(self, world: World) -> tuple[str, ...]:
        """Domains that ask to be admitted to ``world``, and can be reached. Leader only; blocks."""
        assert self._witness is not None
        now = time.monotonic()
        # Nobody is admitted twice in a row without coming: it may see the witness, but not us.
        self._refused = {i: until for i, until in self._refused.items() if until > now}
        found = []
        for process in self._witness.asking() - set(world.ids) - set(self._refused):
            domain, _, host, port = process.split(_SEPARATOR)
            self._refused[process] = now + _REFUSED_SECONDS
            try:
                connect(f"{host}:{port}", 1.0)
            except (ConnectionError, dist.DistError):
                logger.warning("Domain %s asks to join, but cannot be reached", domain)
                continue
            found.append(domain)
        return tuple(found)

    def expel(self, world: World, domain: str) -> None:
        """Tell the witness that ``domain`` is dead, if the witness wants to know."""
        if self._witness is not None:
            self._witness.expel(world.ids[world.domains.index(domain)])

    def mute(self) -> None:
        """Stop the heartbeats until the next ``join``: this process may be stuck, and the others shall
        not wait for it. Safe from any thread."""
        if self._witness is not None:
            self._witness.mute()

    def spare_ports(self) -> set[int]:
        """Ports of the connections that outlive a generation (not to be cut with its groups)."""
        ports = {self._store.port, *self._witness.ports()} if self._witness else set()
        if self._domain_store is not None:
            ports.add(int(os.environ["MASTER_PORT"]))
        return ports

    def leave(self) -> None:
        """Stop the heartbeats for good: the others need not wait for this domain."""
        if self._witness is not None:
            self._witness.close()

    # Inside the domain.

    def _check_in(self, report: Any) -> list[Any]:
        """The reports of all ranks of this domain."""
        deadline = time.monotonic() + (
            self._config.start_timeout_seconds if self._round == 1 else self._bounds.rebuild
        )
        return [report] + [
            self._from_domain(f"report/{self._round}/{rank}", deadline, f"rank {rank}")
            for rank in range(1, self.ranks_per_domain)
        ]

    def _from_domain(self, key: str, deadline: float, sender: str) -> Any:
        """What another rank of this domain has left in torchrun's store."""
        assert self._domain_store is not None
        while True:
            try:
                self._domain_store.wait([key], timedelta(seconds=_GLANCE_SECONDS))
                return json.loads(self._domain_store.get(key))
            except dist.DistError as error:
                # torchrun signals the ranks of a domain when one of them has died.
                if self._leaving() or time.monotonic() > deadline:
                    raise MembershipError(
                        f"{sender} of domain {self._config.domain} is gone; the domain leaves"
                    ) from error

    def _follow(self, report: Any) -> World | None:
        assert self._domain_store is not None
        config = self._config
        # The leader may wait that long itself, and says why when it fails.
        limit = max(config.start_timeout_seconds, config.min_domains_timeout_seconds)
        self._domain_store.set(f"report/{self._round}/{self.local_rank}", json.dumps(report))
        deadline = time.monotonic() + 2 * limit + 10
        data = self._from_domain(f"world/{self._round}", deadline, "the first rank")
        return None if data is None else World.from_json(data, local_rank=self.local_rank)

    # Between domains; the leader only.

    def _lead(self, reports: list[Any], leaving: bool) -> World | None:
        config = self._config
        first = self._formation.formed is None
        limit = config.start_timeout_seconds if first else config.min_domains_timeout_seconds
        began = time.monotonic()
        # Those that wait in vain for enough domains still have to bring their state to safety.
        deadline = began + limit + (0 if first else self._bounds.rebuild)
        if leaving:
            deadline = began + self._bounds.late
        waiting_for = said = "the lighthouse"
        considered = False
        assert self._witness is not None
        while (left := deadline - time.monotonic()) > 0:
            me = self._formation.candidate(
                reports,
                leaving=leaving,
                giving_up=not first and time.monotonic() > began + limit,
            )
            answer = self._witness.propose(me, min(left, _LONGEST_ASK_SECONDS))
            if isinstance(answer, str):
                # Says less than why the last proposal made no world, unless the witness is gone.
                if not considered or "(" in answer:
                    waiting_for = answer
            elif leaving:
                return None
            else:
                considered = True
                try:
                    choice = self._formation.consider(answer.witness, answer.candidates)
                except ValueError as error:
                    raise MembershipError(str(error)) from error
                if isinstance(choice, Wait):
                    waiting_for = choice.reason
                else:
                    world = replace(
                        choice, ranks_per_domain=self.ranks_per_domain, outer=self._outer
                    )
                    missing = self._missing(world)
                    if not missing and not self._witness.settle(world.generation, world.ids):
                        missing = {"another generation was formed first"}
                    if self._formation.acknowledged(world, missing):
                        return world
                    waiting_for = f"domains {', '.join(world.domains)} to acknowledge"
            if waiting_for != said:
                logger.info("Domain %s waits for %s", config.domain, waiting_for)
                said = waiting_for
            time.sleep(_ASK_AGAIN_SECONDS)
        if leaving:
            return None
        raise MembershipError(
            f"domain {config.domain} could not join a generation in time; "
            f"it waited for {waiting_for}"
        )

    def _missing(self, world: World) -> set[str]:
        """Ids of the members that have not seen this very world in time: same members, same reports,
        same number."""
        content = {**world.to_json(), "ft_index": None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        keys = [f"ack/{world.generation}/{digest}/{i}" for i in range(len(world.domains))]
        bound = self._bounds.acknowledge
        try:
            store = connect(world.store_address, bound)
            store.set(keys[world.ft_index], "1")
            try:
                store.wait(keys, timedelta(seconds=bound))
                return set()
            except dist.DistError:
                seen = [store.check([key]) for key in keys]
        except (ConnectionError, dist.DistError) as error:
            logger.info("Generation %d: its store is gone: %s", world.generation, error)
            return {world.ids[0]}
        missing = {i for i, there in zip(world.ids, seen, strict=True) if not there}
        if missing:
            names = [d for d, i in zip(world.domains, world.ids, strict=True) if i in missing]
            logger.info("Generation %d: no word from %s", world.generation, ", ".join(names))
        return missing


def connect(address: str, seconds: float) -> dist.TCPStore:
    """A client of the store at host:port, whose waits last up to ``seconds``.

    Raises:
        ConnectionError: if nobody listens there. At once: the store's client would try for ``seconds``.
        torch.distributed.DistError: if it is gone a moment later.
    """
    host, port = address.rsplit(":", 1)
    bound = min(seconds, _CONNECT_SECONDS)
    try:
        with socket.create_connection((host, int(port)), timeout=bound):
            pass
    except OSError as error:
        raise ConnectionError(f"no store at {address}: {error}") from error
    # Should it die right now, the constructor tries on until its timeout, whatever is cut.
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=bound))
    store.set_timeout(timedelta(seconds=seconds))
    return store
