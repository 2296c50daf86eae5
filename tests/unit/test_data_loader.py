from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ft.data.loader import ElasticDataLoader
from torchtitan_ft.data.sources import DataError, Source
from torchtitan_ft.data.tokens import open_tokens

TEXTS = ["".join(chr(97 + (i * 7 + k * k) % 26) for k in range(20 + 13 * i)) for i in range(12)]


class Letters(BaseTokenizer):
    """One token a character; 0 begins and 1 ends a document."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [0] * add_bos + [max(ord(c) - 95, 2) for c in text] + [1] * add_eos

    def decode(self, *_args: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 30


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": t}) for t in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines[:8]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(lines[8:]) + "\n")
    return folder


def loader(corpus: Path, degree: int, rank: int, *, batch: int = 7, rows: int = 2, seq: int = 16):
    config = ElasticDataLoader.Config(
        dataset_path=str(corpus), cache_folder=str(corpus.parent / "cache"), global_batch=batch
    )
    return config.build(
        dp_world_size=degree,
        dp_rank=rank,
        tokenizer=Letters(),
        seq_len=seq,
        local_batch_size=rows,
        snapshot_every_n_steps=None,
    )


def step_rows(data: ElasticDataLoader) -> Iterator[list[tuple[bytes, bytes, bytes]]]:
    """Per step, the real rows: bytes of input, labels, positions."""
    batches = iter(data)
    while True:
        rows = []
        for inputs, labels in islice(batches, data.plan.accumulation_steps):
            for x, p, y in zip(inputs["input"], inputs["positions"], labels, strict=True):
                if (y != IGNORE_INDEX).any():
                    rows.append((x.numpy().tobytes(), y.numpy().tobytes(), p.numpy().tobytes()))
        yield rows


def test_a_step_is_the_same_on_any_world(corpus: Path) -> None:
    def steps(degree: int) -> list[list]:
        iterators = [step_rows(loader(corpus, degree, r)) for r in range(degree)]
        return [sorted(row for i in iterators for row in next(i)) for _ in range(12)]

    alone = steps(1)
    assert all(len(rows) == 7 for rows in alone)
    assert alone[0] != alone[1]
    for degree in (2, 3, 4, 5, 8):
        assert steps(degree) == alone


def test_consumed_is_what_was_read(corpus: Path) -> None:
    data = [loader(corpus, 3, r) for r in range(3)]
    iterators = [step_rows(d) for d in data]
    for step in range(4):
        counts = [len(next(i)) for i in iterators]
        assert [len(d.consumed) for d in data] == counts
        read = sorted(i for d in data for i in d.consumed)
        assert read == list(range(step * 7, step * 7 + 7))


def test_restart_at_a_step(corpus: Path) -> None:
    through = list(islice(step_rows(loader(corpus, 2, 1)), 6))
    again = loader(corpus, 2, 1)
    again.load_state_dict({"step": 4})
    assert list(islice(step_rows(again), 2)) == through[4:]
    assert again.state_dict() == {"step": 6}


def test_foreign_state_is_ignored(corpus: Path) -> None:
    data = loader(corpus, 1, 0)
    data.load_state_dict({"dp_rank_0": b"x", "world_size": 2})
    assert data.step == 0


def test_labels_stay_in_their_document_as_in_torchtitan(corpus: Path) -> None:
    """Against torchtitan's own packing, token by token."""
    inputs: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for text in TEXTS:
        tokens = Letters().encode(text, add_bos=True, add_eos=True)
        inputs += tokens[:-1]
        labels += tokens[1:]
        positions += range(len(tokens) - 1)
    file = open_tokens(_source(corpus), Letters(), corpus.parent / "cache")
    assert file.sequences(16) == len(inputs) // 16
    for index in range(file.sequences(16)):
        at = slice(index * 16, index * 16 + 16)
        x, y, p = file.sequence(index, 16)
        assert x.tolist() == inputs[at]
        assert y.tolist() == labels[at]
        expected = list(positions[at])
        ends = next((i for i, q in enumerate(expected) if q == 0), 16)
        expected[:ends] = [q - expected[0] for q in expected[:ends]]
        assert p.tolist() == expected


def _source(path: Path, **fields: object) -> Source:
    values = {"dataset": "", "split": "train", "subset": None, "text_field": "text", **fields}
    return Source(dataset_path=str(path), **values)  # type: ignore[arg-type]


def test_changed_file_is_tokenized_anew(corpus: Path) -> None:
    cache = corpus.parent / "cache"
    before = len(open_tokens(_source(corpus), Letters(), cache).tokens)
    with (corpus / "b.jsonl").open("a") as f:
        f.write(json.dumps({"text": "more"}) + "\n")
    assert len(open_tokens(_source(corpus), Letters(), cache).tokens) == before + 6


@pytest.mark.parametrize("damage", ["truncate", "no_meta", "bad_meta", "list_meta", "empty_starts"])
def test_damaged_cache_is_rebuilt(corpus: Path, damage: str) -> None:
    cache = corpus.parent / "cache"
    good = np.array(open_tokens(_source(corpus), Letters(), cache).tokens)
    (folder,) = [f for f in cache.iterdir() if f.is_dir()]
    if damage == "truncate":
        os.truncate(folder / "tokens.bin", 100)
    elif damage == "no_meta":
        (folder / "meta.json").unlink()
    elif damage == "list_meta":
        (folder / "meta.json").write_text("[]")
    elif damage == "empty_starts":
        (folder / "starts.npy").write_bytes(b"")
    else:
        (folder / "meta.json").write_text("{")
    assert (open_tokens(_source(corpus), Letters(), cache).tokens == good).all()


SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from torchtitan_ft import runtime; runtime.activate()
from test_data_loader import Letters, _source
from torchtitan_ft.data.tokens import open_tokens
class Slow(Letters):
    def encode(self, *a, **k):
        print("encode", flush=True); time.sleep({delay}); return super().encode(*a, **k)
Slow.__qualname__ = "Letters"
print("tokens", len(open_tokens(_source(Path({corpus!r})), Slow(), Path({cache!r})).tokens))
"""


def tokenizing(corpus: Path, delay: float) -> subprocess.Popen[str]:
    code = SLOW.format(
        tests=str(Path(__file__).parent),
        delay=delay,
        corpus=str(corpus),
        cache=str(corpus.parent / "cache"),
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_tokenize_once(corpus: Path) -> None:
    outputs = [p.communicate(timeout=120)[0] for p in [tokenizing(corpus, 0.05) for _ in range(2)]]
    assert sum(o.count("encode") for o in outputs) == len(TEXTS)
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1] != ""


def test_killed_tokenizer_leaves_nothing_behind(corpus: Path) -> None:
    process = tokenizing(corpus, 0.2)
    assert process.stdout is not None
    assert process.stdout.readline() == "encode\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cache = corpus.parent / "cache"
    assert any(f.name.endswith(".tmp") for f in cache.iterdir())
    file = open_tokens(_source(corpus), Letters(), cache)
    assert len(file.tokens) == sum(len(t) + 2 for t in TEXTS)
    assert not any(f.name.endswith(".tmp") for f in cache.iterdir())


def test_other_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one")
    (tmp_path / "y.md").write_text("two")
    (tmp_path / "z.json").write_text(json.dumps([{"body": "three"}]))
    assert list(_source(tmp_path / "x.txt").documents()) == ["one"]
    assert list(_source(tmp_path, text_field="body").documents()) == ["one", "two", "three"]


def test_hugging_face_datasets_from_local_files(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    assert list(_source(tmp_path / "saved").documents()) == ["one", "two"]
    assert list(_source(tmp_path / "parquet").documents()) == ["one", "two"]
    file = tmp_path / "parquet" / "train.parquet"
    assert list(_source(file).documents()) == ["one", "two"]
    (tmp_path / "parquet" / "README.md").write_text("A dataset card, no document.")
    assert list(_source(tmp_path / "parquet").documents()) == ["one", "two"]
    splits = datasets.DatasetDict(train=rows, test=datasets.Dataset.from_dict({"text": ["three"]}))
    splits.save_to_disk(str(tmp_path / "splits"))
    assert list(_source(tmp_path / "splits", split="test").documents()) == ["three"]
    with pytest.raises(DataError, match="split 'none'"):
        list(_source(tmp_path / "splits", split="none").documents())


def test_saved_again_is_tokenized_anew(tmp_path: Path) -> None:
    for texts in (["one"], ["one", "two", "three"]):
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
        file = open_tokens(_source(tmp_path / "saved"), Letters(), tmp_path / "cache")
        assert len(file.starts) == len(texts) + 1


def test_registered_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": ["one"]}).to_parquet(str(folder / "a.parquet"))
    assert list(_source(folder, dataset="c4_test").documents()) == ["one"]
    monkeypatch.chdir(tmp_path)  # torchtitan's wheel has no tests/assets
    with pytest.raises(DataError, match="c4_test"):
        list(Source("c4_test", None, "train", None, "text").documents())


def test_what_is_no_document_is_left_out(corpus: Path) -> None:
    (corpus / ".cache").mkdir()
    (corpus / ".cache" / "notes.txt").write_text("hidden")
    (corpus / "README.md").write_text("card")
    assert list(_source(corpus).documents()) == TEXTS


@pytest.mark.parametrize(
    ("prepare", "fields", "message"),
    [
        (lambda f: f.rmdir(), {}, "does not exist"),
        (
            lambda f: (f / "a.jsonl").write_text('{"body": "x"}\n'),
            {},
            r"no text in field 'text'.*body",
        ),
        (lambda f: (f / "a.jsonl").write_text('{"text": "x"}\n{'), {}, r"a\.jsonl:2: not JSON"),
        (lambda f: (f / "a.json").write_text("{"), {}, r"a\.json: not JSON"),
        (lambda f: (f / "a.txt").write_bytes(b"\xff"), {}, r"a\.txt: not UTF-8"),
        (lambda f: (f / "a.jsonl").write_text("\n"), {}, "no text found"),
        (lambda f: (f / "a.txt").write_text("short"), {}, "less than one sequence of 16"),
        (lambda f: None, {}, "nor a Hugging Face dataset that loads"),
    ],
)
def test_clear_errors(tmp_path: Path, prepare, fields, message: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(DataError, match=message):
        loader(folder, 1, 0)


def test_shapes_and_types(corpus: Path) -> None:
    batch, labels = next(iter(loader(corpus, 3, 2, batch=7, rows=2)))
    for tensor in (batch["input"], batch["positions"], labels):
        assert tensor.shape == (2, 16)
        assert tensor.dtype == torch.int64
