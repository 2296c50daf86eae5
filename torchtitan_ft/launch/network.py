"""A network of its own for every fault domain, so that one can be cut off for real.

Each domain gets a network namespace with one interface; its other end is a port of a bridge in the
namespace of the launcher, where the lighthouse listens. Nothing else can be reached from inside.
Cutting a domain off takes its port down: what it sends and what is sent to it is lost without a
word, as in a network that fails.

All names carry the mark of the run, so that :func:`remove` finds them without having made them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACE = "ft0"
"""Name of a domain's interface, inside its namespace."""

_NETWORKS = [ipaddress.IPv4Network(f"10.213.{i}.0/24") for i in range(256)]
_NAMESPACES = Path("/run/netns")
_INTERFACES = Path("/sys/class/net")
_IP_SECONDS = 10.0
_REMOVE_SECONDS = 5.0
_MOST_DOMAINS = 250


class NetworkError(RuntimeError):
    """There can be no such network; the message says why."""


def check() -> None:
    """Raises :class:`NetworkError` for what can be known without making anything."""
    if shutil.which("ip") is None:
        raise NetworkError("network namespaces need Linux and the command 'ip' (iproute2)")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root")


class Network:
    """Namespaces for ``domains``, made at once.

    Args:
        mark: of the run; see processes.py.
        domains: their names.

    Raises:
        NetworkError: if it cannot be made; nothing is left behind then.
    """

    def __init__(self, mark: str, domains: Sequence[str]) -> None:
        check()
        if len(domains) > _MOST_DOMAINS:
            raise NetworkError(f"a network has at most {_MOST_DOMAINS} domains")
        self._mark = mark
        self._bridge = f"{_prefix(mark)}b"
        self._ports = {name: f"{_prefix(mark)}v{i}" for i, name in enumerate(domains)}
        self._namespaces = {name: f"{_prefix(mark)}n{i}" for i, name in enumerate(domains)}
        try:
            subnet = self._make_bridge()
            hosts = subnet.hosts()
            self.address = str(next(hosts))
            """Of the bridge, on the launcher's side."""
            for name, host in zip(domains, hosts, strict=False):
                self._make_namespace(name, f"{host}/{subnet.prefixlen}")
        except BaseException:
            self.close()
            raise

    def _make_bridge(self) -> ipaddress.IPv4Network:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "addrgenmode", "none", "up")
        for subnet in random.SystemRandom().sample(_NETWORKS, len(_NETWORKS)):
            if any(subnet.overlaps(other) for other in _taken()):
                continue
            address = f"{next(subnet.hosts())}/{subnet.prefixlen}"
            _ip("address", "add", address, "dev", self._bridge)
            # Another launcher may have chosen the same at the same time: then both look further.
            if not any(subnet.overlaps(other) for other in _taken(but=self._bridge)):
                return subnet
            _ip("address", "del", address, "dev", self._bridge)
        raise NetworkError("no free network among 10.213.0.0/24 to 10.213.255.0/24")

    def _make_namespace(self, domain: str, address: str) -> None:
        namespace, port = self._namespaces[domain], self._ports[domain]
        inside = ("-n", namespace)
        _ip("netns", "add", namespace)
        _ip(
            *("link", "add", port, "type", "veth"), *("peer", "name", INTERFACE, "netns", namespace)
        )
        # No address but ours: gloo takes whichever it finds first.
        _ip("link", "set", port, "addrgenmode", "none", "master", self._bridge, "up")
        _ip(*inside, "link", "set", INTERFACE, "addrgenmode", "none")
        _ip(*inside, "address", "add", address, "dev", INTERFACE)
        _ip(*inside, "link", "set", INTERFACE, "up")
        _ip(*inside, "link", "set", "lo", "up")

    def command(self, domain: str) -> list[str]:
        """What to put before a command so that it runs inside ``domain``."""
        return ["ip", "netns", "exec", self._namespaces[domain]]

    def environment(self) -> dict[str, str]:
        """What processes inside must be told: the name of the host leads nowhere there."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}

    def cut(self, domain: str) -> None:
        """From now on nothing goes into ``domain``, or comes out."""
        _ip("link", "set", self._ports[domain], "down")

    def heal(self, domain: str) -> None:
        """Undo :meth:`cut`."""
        _ip("link", "set", self._ports[domain], "up")

    def close(self) -> bool:
        """Remove everything; False if something stays."""
        return remove(self._mark)


def remove(mark: str) -> bool:
    """Remove the network of the run with this mark, if there is any; False if something stays."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while commands := list(_removals(_prefix(mark))):
        if time.monotonic() > deadline:
            return False
        for command in commands:
            # What has gone meanwhile is no failure: an interface goes with the other end of it.
            with contextlib.suppress(NetworkError):
                _ip(*command)
        time.sleep(0.01)
    return True


def _removals(prefix: str) -> Iterator[list[str]]:
    for name in _names(_INTERFACES, prefix):
        yield ["link", "del", name]
    for name in _names(_NAMESPACES, prefix):
        yield ["netns", "del", name]


def _names(folder: Path, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except FileNotFoundError:
        return []


def _prefix(mark: str) -> str:
    return f"tft{mark[:6]}"  # an interface has a name of at most 15 characters


def _taken(but: str = "") -> list[ipaddress.IPv4Network]:
    """Networks that this machine knows a way to, other than by the interface ``but``."""
    addresses = [
        ipaddress.IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)
        for interface in json.loads(_ip("-j", "-4", "address"))
        for address in interface.get("addr_info", ())
        if interface.get("ifname") != but and "local" in address
    ]
    ways = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in json.loads(_ip("-j", "-4", "route"))
        if route["dst"] != "default" and route.get("dev") != but
    ]
    return addresses + ways


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["ip", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_IP_SECONDS,
            start_new_session=True,  # Ctrl-C must not leave half of it done
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"ip {' '.join(arguments)}: {error}") from error
    if done.returncode:
        raise NetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
