"""Notices at once that another domain is dead, soon that it hangs, and that this rank does.

One thread per process and generation. It keeps a connection to the process that leads each other
domain, and sends HTTP/2 pings (RFC 9113, section 6.7) to the server there that answers without the
interpreter (``Witness.address``): a dead process closes its connection, a stopped one does not answer,
one that is merely busy in Python does. This rank's own progress is measured by the marks that the
training leaves in :class:`Progress`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # preface, empty SETTINGS
_PING = b"\0\0\x08\x06\0\0\0\0\0" + b"liveness"
_AGAIN_SECONDS = 0.1
"""Connections may still be made while those of a broken generation are being cut."""


class Progress:
    """Where the main thread is, and since when. Written by it alone, read by any thread."""

    def __init__(self) -> None:
        self._bound: float | None = None
        self._since = time.monotonic()

    def mark(self, bound: float | None) -> None:
        """It has got somewhere; the next mark is due within ``bound`` seconds (None: whenever)."""
        self._since = time.monotonic()
        self._bound = bound

    def overdue(self) -> float | None:
        """The bound that has been exceeded, if one has."""
        bound, since = self._bound, self._since
        if bound is not None and time.monotonic() - since > bound:
            return bound
        return None


@dataclass(frozen=True)
class Loss:
    """What the watch has noticed."""

    reason: str
    domain: str | None
    """The other domain that it is about; None if this rank itself makes no progress."""
    last_alive: float
    """When it was last known to live (unix seconds)."""
    dead: bool = False
    """Its connection is closed: it is certain."""


@dataclass
class _Peer:
    domain: str
    address: str
    socket: socket.socket | None = None
    asked: float = 0.0
    """When the oldest unanswered ping was sent (monotonic); 0 if there is none."""
    heard: float = field(default_factory=time.time)
    connecting: bool = True


class Watch(threading.Thread):
    """Watches from ``start`` to ``stop``.

    Args:
        peers: domain -> host:port of its server.
        silence: seconds without an answer until a domain counts as lost.
        progress: of this rank.
        on_loss: called in this thread, with the first loss noticed.
        cut: called in this thread, again and again from the first loss to ``stop``: frees the main
            thread from whatever it waits for.
        patience: see ``on_stuck``.
        on_stuck: called in this thread, once, if the main thread has not stopped the watch ``silence``
            after it was found without progress, or ``patience`` after another's loss (it may be making
            a connection, which cannot be cut): it waits for nothing that others could end.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        *,
        silence: float,
        patience: float,
        progress: Progress,
        on_loss: Callable[[Loss], None],
        cut: Callable[[], object],
        on_stuck: Callable[[], object],
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._peers = [_Peer(domain, address) for domain, address in peers.items()]
        self._silence = silence
        self._patience = patience
        self._progress = progress
        self._on_loss = on_loss
        self._cut = cut
        self._on_stuck = on_stuck
        self._end = threading.Event()
        self.loss: Loss | None = None
        """The first loss noticed."""

    def stop(self) -> None:
        """End the watch; returns when nothing will be cut any more."""
        self._end.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for peer in self._peers:
                self._connect(peer, selector, stack)
            while not self._end.is_set() and self.loss is None:
                for key, _ in selector.select(timeout=self._silence / 10):
                    self._hear(key.data, selector)
                # Only now: a thread that was kept from running must first read what has come.
                self._judge()
        noticed, stuck = time.monotonic(), False
        itself = self.loss is not None and self.loss.domain is None
        patience = self._silence if itself else self._patience
        while not self._end.is_set():
            self._cut()
            if not stuck and time.monotonic() - noticed > patience:
                stuck = True
                self._on_stuck()
            self._end.wait(_AGAIN_SECONDS)

    def _connect(
        self, peer: _Peer, selector: selectors.BaseSelector, stack: contextlib.ExitStack
    ) -> None:
        host, port = peer.address.rsplit(":", 1)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.socket = connection
        peer.asked = time.monotonic()
        connection.connect_ex((host, int(port)))
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _hear(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        assert peer.socket is not None
        try:
            if peer.connecting:
                error = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "refused")
                peer.connecting = False
                selector.modify(peer.socket, selectors.EVENT_READ, peer)
                peer.socket.send(_HELLO)
                peer.socket.send(_PING)
                return
            if not peer.socket.recv(4096):
                raise ConnectionResetError
        except BlockingIOError:
            return
        except OSError:
            selector.unregister(peer.socket)
            self._lost(peer, "has closed its connection", dead=True)
            return
        peer.heard, peer.asked = time.time(), 0.0

    def _judge(self) -> None:
        if self.loss is not None:
            return
        now = time.monotonic()
        for peer in self._peers:
            assert peer.socket is not None
            if peer.asked and now - peer.asked > self._silence:
                self._lost(peer, f"has been silent for {self._silence:g} s")
                return
            if not peer.asked and not peer.connecting:
                if time.time() - peer.heard < self._silence / 5:
                    continue
                peer.asked = now
                with contextlib.suppress(OSError):  # a closed one is heard
                    peer.socket.send(_PING)
        if (bound := self._progress.overdue()) is not None:
            self._report(Loss(f"no progress for {bound:.1f} s", None, time.time() - bound))

    def _lost(self, peer: _Peer, what: str, *, dead: bool = False) -> None:
        last = time.time() if dead else peer.heard
        self._report(Loss(f"domain {peer.domain} {what}", peer.domain, last, dead))

    def _report(self, loss: Loss) -> None:
        if self.loss is None:
            self.loss = loss
            self._on_loss(loss)
