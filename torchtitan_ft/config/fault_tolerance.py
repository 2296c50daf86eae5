"""The ``[fault_tolerance]`` table: everything a user can say about redundancy and membership."""

from dataclasses import dataclass

from .bounds import Bounds


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

    min_domains: int = 1
    """While fewer domains than this live, they hold their state and wait for others."""

    failure_timeout_seconds: float = 2.0
    """
    How long a silent domain is waited for. The one choice of its kind: heartbeats, acknowledgements,
    the stages of a rebuild and the bound on a step follow from it, and are logged once at the start.
    """

    step_timeout_seconds: float = 0.0
    """
    A rank that makes no progress in a step for this long is taken for hung. 0 follows the measured
    steps: five times the slowest of the last 20, and at least four times `failure_timeout_seconds`.
    """

    start_timeout_seconds: float = 300.0
    """How long to wait for `domains` domains before the first step; then a clear error."""

    min_domains_timeout_seconds: float = 600.0
    """
    How long to wait for `min_domains` domains. Then the state in memory is written as a checkpoint,
    if it is complete, and the run ends.
    """

    drain_timeout_seconds: float = 60.0
    """
    After SIGTERM a domain finishes its step, hands over its shard and leaves; it has this long. A
    second SIGTERM ends it at once.
    """

    chaos: str = ""
    """
    Faults to inject, for tests and demos: `;`-separated `ACTION:domain=D,step=S,phase=P[,rank=R]`. What a
    process cannot do to itself (come back, be cut off) only the launcher does: use its `--chaos`.
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
        for name in (
            "failure_timeout_seconds",
            "start_timeout_seconds",
            "min_domains_timeout_seconds",
            "drain_timeout_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"fault_tolerance.{name} must be positive")
        if self.failure_timeout_seconds < 0.2:
            raise ValueError(
                "fault_tolerance.failure_timeout_seconds must be at least 0.2: a healthy process "
                "may be off the processor for that long"
            )
        if self.step_timeout_seconds < 0:
            raise ValueError("fault_tolerance.step_timeout_seconds must not be negative")
        if 0 < self.step_timeout_seconds < 2 * self.failure_timeout_seconds:
            raise ValueError(
                "fault_tolerance.step_timeout_seconds must be at least twice "
                f"failure_timeout_seconds ({self.failure_timeout_seconds:g}), or 0 to follow the steps"
            )
        if not 1 <= self.min_domains <= self.domains:
            raise ValueError(
                f"fault_tolerance.min_domains must be in [1, domains = {self.domains}], "
                f"got {self.min_domains}"
            )

    @property
    def bounds(self) -> Bounds:
        """Every other bound on waiting."""
        return Bounds(self.failure_timeout_seconds)
