"""Freeing ranks that wait in a collective of a dead generation, and telling such failures apart."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

import torch.distributed as dist


def _open_sockets() -> dict[int, str]:
    """Descriptor -> inode link of every socket this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed meanwhile
            continue
        if link.startswith("socket:"):
            found[int(name)] = link
    return found


class GlooSockets:
    """The TCP sockets that gloo opened for one generation, and the way to cut them.

    ``ProcessGroupGloo.abort()`` and ``destroy_process_group()`` do not free a rank that waits in a
    gloo collective (torch 2.14): it waits out the group's timeout. Shutting the sockets down does,
    on both ends, and the error cascades to every rank within milliseconds.

    Gloo's are the stream sockets opened since construction, less those that talk to a port in
    ``spare`` (the stores, the lighthouse, our own heartbeat server). Connections to ``store``, the
    generation's own, are cut as well: a rank may be waiting there for one that is dead.
    """

    def __init__(self, *, spare: Collection[int], store: int) -> None:
        self._before = _open_sockets()
        self._spare = frozenset(spare)
        self._store = store

    def shut_down(self) -> int:
        """Cut every socket of the generation; returns how many. Safe from any thread, idempotent."""
        count = 0
        for fd, link in _open_sockets().items():
            if self._before.get(fd) == link:
                continue
            try:
                duplicate = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            with duplicate:
                try:
                    if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if duplicate.type != socket.SOCK_STREAM:
                        continue
                    here, there = duplicate.getsockname()[1], duplicate.getpeername()[1]
                    if there != self._store and {here, there} & self._spare:
                        continue
                    duplicate.shutdown(socket.SHUT_RDWR)
                    count += 1
                except OSError:  # not connected, or cut already
                    continue
        return count


_SIGNS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "timed out",
)


def is_communication_failure(error: BaseException) -> bool:
    """Whether ``error`` says that a peer or the network failed, and not the user's own code.

    c10d raises typed errors for NCCL and the store, but plain ``RuntimeError`` for gloo; those are
    known by their text.
    """
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)
