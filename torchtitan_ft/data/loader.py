"""torchtitan's dataloader, elastic: what it yields depends on the step, who gets it on the world."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from .order import BatchPlan, sequence_of
from .sources import DataError, Source
from .tokens import open_tokens


class ElasticDataLoader(BaseDataLoader):
    """Microbatches of this rank, step after step, for ever; its only state is the step.

    Args:
        config: what to read.
        dp_world_size: data-parallel ranks.
        dp_rank: this rank among them.
        tokenizer: encodes the documents.
        seq_len: tokens of a sequence (S).
        local_batch_size: rows that fit into one microbatch.

    Raises:
        DataError: if the data cannot be read, or is shorter than one sequence.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = ""
        """
        A name torchtitan registers (c4, c4_test, ...), any Hugging Face dataset, or, with
        `dataset_path`, a name of your own.
        """

        dataset_path: str | None = None
        """
        A folder of .txt, .md, .jsonl or .json files (or one such file), a folder written by
        `save_to_disk`, or a path for `load_dataset`.
        """

        split: str = "train"
        """Split of a Hugging Face dataset."""

        subset: str | None = None
        """Subset ("name") of a Hugging Face dataset."""

        text_field: str = "text"
        """Field of a row or JSON line that holds the text."""

        cache_folder: str | None = None
        """Where tokenized corpora are kept; by default below the user's cache folder."""

        shuffle: bool = True
        """Whether each epoch reads the sequences in an order of its own."""

        seed: int = 0
        """Seed of the order; the trainer sets it to `debug.seed`."""

        global_batch: int = 0
        """Samples of a step over all ranks; set by the trainer, 0 means one full microbatch a rank."""

    step: int
    """Steps read so far: the next microbatch belongs to step number ``step + 1``."""
    consumed: list[int]
    """Numbers of the samples this rank has read for the step in flight; padding is not among them."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **_kwargs: Any,
    ) -> None:
        self._config = config
        self._rank = dp_rank
        self._length = seq_len
        self.plan = BatchPlan(
            global_batch=config.global_batch or local_batch_size * dp_world_size,
            degree=dp_world_size,
            local_batch_limit=local_batch_size,
        )
        source = Source(
            dataset=config.dataset,
            dataset_path=config.dataset_path,
            split=config.split,
            subset=config.subset,
            text_field=config.text_field,
        )
        self._tokens = open_tokens(source, tokenizer, _cache_folder(config.cache_folder))
        self._sequences = self._tokens.sequences(seq_len)
        if not self._sequences:
            raise DataError(
                f"the dataset has {len(self._tokens.tokens)} tokens: less than one sequence of "
                f"{seq_len} (training.seq_len)"
            )
        self.step = 0
        self.consumed = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield ({"input": int64 [rows, S], "positions": int64 [rows, S]}, labels int64 [rows, S])."""
        plan = self.plan
        while True:
            first = self.step * plan.global_batch
            self.step += 1
            self.consumed = []
            for microbatch in range(plan.accumulation_steps):
                yield self._microbatch(first, microbatch)

    def _microbatch(
        self, first: int, microbatch: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        shape = (self.plan.local_batch, self._length)
        inputs, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        positions = np.tile(np.arange(self._length), (shape[0], 1))
        for row in range(shape[0]):
            j = self.plan.sample(self._rank, microbatch, row)
            if j is None:
                continue
            sample = first + j
            sequence = sequence_of(
                sample, self._sequences, seed=self._config.seed, shuffle=self._config.shuffle
            )
            inputs[row], labels[row], positions[row] = self._tokens.sequence(sequence, self._length)
            self.consumed.append(sample)
        batch = {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)}
        return batch, torch.from_numpy(labels)

    def state_dict(self) -> dict[str, Any]:
        """The step: all there is to save, on every rank the same."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step. The state of torchtitan's own loader says nothing about it."""
        if "step" in state_dict:
            self.step = int(state_dict["step"])
        elif state_dict:
            logger.warning("The checkpoint has no elastic loader state; data follows the step.")


def _cache_folder(configured: str | None) -> Path:
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "torchtitan-ft" / "tokens"
