"""What a membership backend does: it sees who asks to be in the next generation, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .formation import Candidate


class MembershipError(RuntimeError):
    """No generation could be formed within the bounds the user has set."""


@dataclass(frozen=True)
class Proposal:
    """Who asks to be in the next generation, as one moment saw it."""

    witness: int
    """How often the answer has changed so far."""
    candidates: Sequence[Candidate]


class Witness(Protocol):
    """One domain's line to the backend. Heartbeats run from construction to ``close``, in threads that
    need no Python: a busy interpreter must not look dead."""

    arbiter: bool
    """See :class:`formation.Formation`."""
    alone: bool
    """Whether no other domain can ever find the backend."""
    address: str
    """host:port where this process answers HTTP/2 pings as long as it runs; see ``watch.py``."""

    def propose(self, me: Candidate, seconds: float) -> Proposal | str:
        """Ask to be in the next generation. Blocks until others ask too, at most ``seconds``.

        Returns:
            A proposal; or why there is none yet, then the caller asks again.
        """

    def settle(self, generation: int, ids: Sequence[str]) -> bool:
        """All members have acknowledged: make it final. False if another one was faster."""

    def asking(self) -> frozenset[str]:
        """Ids of live processes, members or not. Raises OSError if the backend is out of reach."""

    def expel(self, process: str) -> None:
        """This process is known to be dead: do not wait until its silence shows it."""

    def mute(self) -> None:
        """Stop the heartbeats until the next ``propose``: this process may be stuck. Safe from any
        thread, idempotent."""

    def close(self) -> None:
        """Stop the heartbeats for good."""

    def ports(self) -> set[int]:
        """Of its connections; they outlive a generation."""
