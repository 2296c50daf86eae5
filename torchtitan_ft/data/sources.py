"""Where documents come from: local text, torchtitan's registered datasets, any Hugging Face dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXT = {".txt", ".md"}
_JSON = {".jsonl", ".json"}


class DataError(ValueError):
    """The data cannot be read as configured; says what was looked for."""


@dataclass(frozen=True)
class Source:
    """What the ``[dataloader]`` table names."""

    dataset: str
    dataset_path: str | None
    split: str
    subset: str | None
    text_field: str

    def identity(self) -> str:
        """A string that changes when the documents do (for local files: names, sizes, mtimes)."""
        files = _local_files(self.dataset_path)
        stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        whole = [self.dataset, self.dataset_path, self.split, self.subset, self.text_field, stats]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        """The texts, in a fixed order.

        Raises:
            DataError: if there is nothing to read, or a document has no ``text_field``.
        """
        files = _local_files(self.dataset_path)
        if files:
            for file in files:
                yield from _read(file, self.text_field)
            return
        yield from self._hugging_face()

    def _hugging_face(self) -> Iterator[str]:
        from datasets import load_dataset, load_from_disk
        from torchtitan.hf_datasets.text_datasets import DATASETS

        path = self.dataset_path
        if self.dataset in DATASETS:
            known = DATASETS[self.dataset]
            for sample in known.loader(path or known.path):
                yield known.sample_processor(sample)
            return
        name = path or self.dataset
        if not name:
            raise DataError("set dataloader.dataset or dataloader.dataset_path")
        try:
            if path and (Path(path) / "state.json").exists():
                rows: Any = load_from_disk(path)
            else:
                rows = load_dataset(name, self.subset, split=self.split)
        except Exception as error:
            raise DataError(
                f"dataloader names {name!r} (subset {self.subset!r}, split {self.split!r}), which is "
                f"neither a local folder with .txt, .md, .jsonl or .json files, nor one of torchtitan's "
                f"datasets ({', '.join(DATASETS)}), nor a Hugging Face dataset that loads: {error}"
            ) from error
        for row in rows:
            yield _text(row, self.text_field, name)


def _local_files(path: str | None) -> list[Path]:
    """Text files at ``path``; none when it is not local text.

    Raises:
        DataError: if ``path`` looks like a local path and does not exist.
    """
    if not path:
        return []
    root = Path(path)
    if root.is_file():
        if root.suffix not in _TEXT | _JSON:
            raise DataError(f"{path}: expected a .txt, .md, .jsonl or .json file")
        return [root]
    if not root.exists():
        if path.startswith(("/", ".", "~")):
            raise DataError(f"dataloader.dataset_path {path!r} does not exist")
        return []
    if (root / "state.json").exists():  # written by datasets' save_to_disk
        return []
    return sorted(f for f in root.rglob("*") if f.suffix in _TEXT | _JSON and f.is_file())


def _read(file: Path, text_field: str) -> Iterator[str]:
    if file.suffix in _TEXT:
        yield file.read_text(encoding="utf-8")
        return
    if file.suffix == ".json":
        rows = json.loads(file.read_text(encoding="utf-8"))
        for row in rows if isinstance(rows, list) else [rows]:
            yield _text(row, text_field, str(file))
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{file}:{number}: not JSON: {error}") from error
                yield _text(row, text_field, f"{file}:{number}")


def _text(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{where}: no text in field {field!r} (dataloader.text_field); it has: {has}"
        )
    return row[field]
