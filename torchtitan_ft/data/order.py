"""Which samples make a step, and which rank reads which. Pure; no torch here.

Samples are numbered once and for all: sample ``i`` of the run is ``step_index * B + j``. Which sequence
of the corpus that is depends on the seed alone, so neither the number of ranks nor a death changes what
is read, only who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is split over ranks and microbatches.

    Rank r of D reads samples r, r + D, r + 2D, ... of the batch, so that ranks differ by one sample at
    most, in microbatches of ``local_batch`` rows. What does not divide is padded with rows that carry
    no label.
    """

    global_batch: int
    """Samples of one step (B)."""
    degree: int
    """Data-parallel ranks (D)."""
    local_batch_limit: int
    """Rows that fit into one microbatch."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "degree", "local_batch_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def accumulation_steps(self) -> int:
        """Microbatches per rank and step."""
        return -(-self.global_batch // (self.local_batch_limit * self.degree))

    @property
    def local_batch(self) -> int:
        """Rows of each microbatch: as few as do, at most ``local_batch_limit``."""
        rows = -(-self.global_batch // self.degree)
        return -(-rows // self.accumulation_steps)

    def sample(self, rank: int, microbatch: int, row: int) -> int | None:
        """The sample of the batch (0..B-1) in this slot; None for padding."""
        j = (microbatch * self.local_batch + row) * self.degree + rank
        return j if j < self.global_batch else None


@lru_cache(maxsize=2)
def _permutation(sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(sequences)


def sequence_of(sample: int, sequences: int, *, seed: int, shuffle: bool) -> int:
    """The corpus sequence that sample number ``sample`` of the run is; every epoch has each once."""
    epoch, place = divmod(sample, sequences)
    return int(_permutation(sequences, seed, epoch)[place]) if shuffle else place
