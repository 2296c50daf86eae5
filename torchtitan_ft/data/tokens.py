"""Documents, tokenized once, into a memory-mapped file that all processes share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger
from tqdm import tqdm

from .sources import DataError, Source

_FORMAT = 2
"""Raise it with any change to what is written here, or to which documents a source gives."""
_LOG_SECONDS = 10.0
"""How often progress is logged where there is no terminal for a bar."""
_LOCK_SECONDS = 6 * 3600.0
"""A large corpus takes hours; the lock dies with its holder, so this bounds only a living one."""


@dataclass(frozen=True)
class TokenFile:
    """A tokenized corpus.

    The packed stream is torchtitan's: of every document, inputs are all tokens but the last and labels
    all but the first, so that no label crosses a document; documents follow each other without gap.
    """

    tokens: np.ndarray
    """All tokens, document after document, [T]."""
    starts: np.ndarray
    """Where each document starts in the packed stream, [documents + 1]."""

    def sequences(self, length: int) -> int:
        """How many whole sequences of ``length`` the stream has."""
        return int(self.starts[-1]) // length

    def sequence(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, labels and positions of one sequence, each int64 [length]; positions count from the
        start of the document, or of the sequence where the document began before it."""
        at = np.arange(index * length, (index + 1) * length)
        document = np.searchsorted(self.starts, at, side="right") - 1
        # Each document before this one has one token more than it has places in the stream.
        token = at + document
        begins = np.maximum(self.starts[document], at[0])
        inputs = self.tokens[token].astype(np.int64)
        labels = self.tokens[token + 1].astype(np.int64)
        return inputs, labels, at - begins


def open_tokens(source: Source, tokenizer: BaseTokenizer, cache: Path) -> TokenFile:
    """The tokens of ``source``, from the cache or, in one of the processes that ask, made now.

    Raises:
        DataError: if there is nothing to read, or another process holds the lock for too long.
    """
    key = hashlib.sha256(
        f"{_FORMAT}/{source.identity()}/{_tokenizer_identity(tokenizer)}".encode()
    ).hexdigest()[:24]
    folder = cache / key
    found = _load(folder)
    if found is None:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock"):
            found = _load(folder)
            if found is None:
                _write(folder, source, tokenizer)
                found = _load(folder)
    assert found is not None
    return found


def _load(folder: Path) -> TokenFile | None:
    """The file in ``folder`` if it is complete, of the sizes it says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        starts = np.load(folder / "starts.npy", mmap_mode="r")
        complete = len(tokens) == meta["tokens"] and len(starts) == meta["documents"] + 1
        # The last start says how many tokens there must be: each document has one more than places.
        complete = complete and int(starts[-1]) + meta["documents"] == meta["tokens"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError):
        return None
    if not complete:
        return None
    return TokenFile(tokens, starts)


def _write(folder: Path, source: Source, tokenizer: BaseTokenizer) -> None:
    work = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
        starts, count = [0], 0
        with (work / "tokens.bin").open("wb") as out:
            for text in _with_progress(source.documents()):
                tokens = np.asarray(tokenizer.encode(text, add_bos=True, add_eos=True), dtype=dtype)
                if len(tokens) < 2:
                    continue
                tokens.tofile(out)
                count += len(tokens)
                starts.append(starts[-1] + len(tokens) - 1)
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise DataError(
                f"no text found for dataset {source.dataset!r} at {source.dataset_path!r}"
            )
        np.save(work / "starts.npy", np.asarray(starts, dtype=np.int64))
        meta = {"dtype": dtype.name, "tokens": count, "documents": len(starts) - 1}
        (work / "meta.json").write_text(json.dumps(meta))
        if folder.exists():  # not complete, or we would not be here
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        # What killed processes left: they held the lock we hold now.
        for stale in folder.parent.glob(f"{folder.name}.*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)


def _with_progress(documents: Iterator[str]) -> Iterator[str]:
    """``documents``, with a bar on a terminal and now and then a line elsewhere."""
    if sys.stderr.isatty():
        yield from tqdm(documents, desc="Tokenizing", unit=" documents", mininterval=0.5)
        return
    count, said = 0, time.monotonic()
    for count, text in enumerate(documents, 1):
        yield text
        if time.monotonic() - said > _LOG_SECONDS:
            said = time.monotonic()
            logger.info(f"Tokenizing: {count:,} documents so far")
    logger.info(f"Tokenized {count:,} documents")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        deadline = time.monotonic() + _LOCK_SECONDS
        waited = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"waited {_LOCK_SECONDS:.0f} s for another process to tokenize: it holds {path}"
                    ) from None
                if not waited:
                    logger.info(f"Waiting for the process that tokenizes (it holds {path})")
                waited = True
                time.sleep(0.1)
        yield


def _tokenizer_identity(tokenizer: BaseTokenizer) -> str:
    inner: Any = getattr(tokenizer, "tokenizer", None)
    text = inner.to_str() if hasattr(inner, "to_str") else ""
    name = type(tokenizer).__qualname__
    return hashlib.sha256(f"{name}/{tokenizer.get_vocab_size()}/{text}".encode()).hexdigest()
