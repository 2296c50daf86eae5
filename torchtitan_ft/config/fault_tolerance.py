"""The ``[fault_tolerance]`` table: everything a user can say about redundancy and membership."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class FaultToleranceConfig:
    """Redundancy and membership of a run. Plain data; no torch behind it."""

    overlap: float = 0.25
    """
    The redundancy dial, from 0.0 (FSDP, no copies) to 1.0 (every domain holds everything).
    With N live domains every shard has ``min(N - 1, ceil(overlap * N))`` extra copies, and as many
    domains may die at the same moment without losing state.
    """

    domain: str = "0"
    """Name of the fault domain this process belongs to. Unique per domain; the launcher sets it."""

    domains: int = 1
    """
    Fault domains to wait for before the first step. It also fixes the global batch when
    `training.global_batch_size` is -1: local_batch_size * data-parallel degree at this many domains.
    """

    start_timeout_seconds: float = 300.0
    """How long to wait for `domains` domains before the first step; then a clear error."""

    rebuild_timeout_seconds: float = 30.0
    """Bound on each stage of a rebuild: agreeing on the members, connecting, restoring state."""

    heartbeat_timeout_ms: int = 500
    """A domain silent for this long is dead to the lighthouse (embedded lighthouse only)."""

    join_timeout_ms: int = 5000
    """
    How long the lighthouse waits for a live but late domain before it goes on without it. Keep it
    above the longest time a survivor needs to leave a broken step (embedded lighthouse only).
    """

    chaos: str = ""
    """
    Faults to inject, for tests and demos: `;`-separated `kill:domain=D,step=S,phase=P[,rank=R]`,
    phases before_step, forward, backward, mirror, vote, optimizer, after_commit.
    """

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"fault_tolerance.overlap must be in [0.0, 1.0], got {self.overlap}")
        if self.domains < 1:
            raise ValueError(f"fault_tolerance.domains must be at least 1, got {self.domains}")
        if not self.domain or not all(c.isalnum() or c in "-_." for c in self.domain):
            raise ValueError(
                "fault_tolerance.domain must be a name of letters, digits, '-', '_' or '.', "
                f"got {self.domain!r}"
            )
        for name in ("start_timeout_seconds", "rebuild_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"fault_tolerance.{name} must be positive")
        if self.heartbeat_timeout_ms < 100:
            raise ValueError("fault_tolerance.heartbeat_timeout_ms must be at least 100")
        if self.join_timeout_ms < self.heartbeat_timeout_ms:
            raise ValueError(
                "fault_tolerance.join_timeout_ms must not be below heartbeat_timeout_ms"
            )
