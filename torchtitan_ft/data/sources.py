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
_FOR_DATASETS = {".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst", ".xz", ".bz2", ".zip"}
"""Files that ``datasets`` reads and we do not: a folder with one of them is left to it."""
_SAVED = ("state.json", "dataset_dict.json")
"""What ``save_to_disk`` writes, of a dataset or of one with splits."""


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
        """A string that changes when the documents do (for local files: names, sizes, mtimes).

        Counts every file at the local path, not only text: parquet and saved datasets change too.
        """
        root = Path(self._location()).expanduser()
        files = _visible_files(root) if root.is_dir() else [root] if root.is_file() else []
        stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        whole = [self.dataset, self.dataset_path, self.split, self.subset, self.text_field, stats]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def documents(self) -> Iterator[str]:
        """The texts, in a fixed order.

        Raises:
            DataError: if there is nothing to read, or a document has no ``text_field``.

        Local text is read here whatever ``dataset`` says, so that a job with a registered name can be
        pointed at a folder of one's own.
        """
        files = _local_files(self.dataset_path)
        if files:
            for file in files:
                yield from _read(file, self.text_field)
            return
        yield from self._hugging_face()

    def _location(self) -> str:
        """The path or name that is read: ``dataset_path``, or where the registered dataset is."""
        if self.dataset_path:
            return self.dataset_path
        from torchtitan.hf_datasets.text_datasets import DATASETS

        known = DATASETS.get(self.dataset.lower())
        name = known.path if known else self.dataset
        if not name:
            raise DataError("set dataloader.dataset or dataloader.dataset_path")
        return name

    def _hugging_face(self) -> Iterator[str]:
        from datasets import DatasetDict, load_dataset, load_from_disk
        from torchtitan.hf_datasets.text_datasets import DATASETS

        name = self._location()
        known = DATASETS.get(self.dataset.lower())
        local = Path(name).expanduser()
        rows: Any
        try:
            if known:
                rows = known.loader(name)
            elif any((local / saved).exists() for saved in _SAVED):
                rows = load_from_disk(str(local))
                if isinstance(rows, DatasetDict):
                    rows = rows[self.split]
            elif local.is_file():  # load_dataset takes the reader's name, not a lone file
                reader = {".tsv": "csv"}.get(local.suffix, local.suffix[1:])
                rows = load_dataset(reader, data_files=str(local), split=self.split)
            else:
                name = str(local) if local.exists() else name
                rows = load_dataset(name, self.subset, split=self.split)
        except Exception as error:
            raise DataError(
                f"dataloader names {name!r} (subset {self.subset!r}, split {self.split!r}), which is "
                f"neither a local folder with .txt, .md, .jsonl or .json files, nor one of torchtitan's "
                f"datasets ({', '.join(DATASETS)}), nor a Hugging Face dataset that loads: {error}"
            ) from error
        for row in rows:
            yield known.sample_processor(row) if known else _text(row, self.text_field, name)


def _visible_files(root: Path) -> list[Path]:
    """All files below ``root``, sorted; not those of hidden folders (.git, .cache)."""
    return sorted(
        f
        for f in root.rglob("*")
        if f.is_file() and not any(part.startswith(".") for part in f.relative_to(root).parts)
    )


def _local_files(path: str | None) -> list[Path]:
    """Text files at ``path``; none when it is not local text.

    Raises:
        DataError: if ``path`` looks like a local path and does not exist.
    """
    if not path:
        return []
    root = Path(path).expanduser()
    if root.is_file():
        if root.suffix in _FOR_DATASETS:
            return []
        if root.suffix not in _TEXT | _JSON:
            raise DataError(
                f"{path}: expected a .txt, .md, .jsonl or .json file, or one of datasets'"
            )
        return [root]
    if not root.exists():
        if path.startswith(("/", ".", "~")):
            raise DataError(f"dataloader.dataset_path {path!r} does not exist")
        return []
    if any((root / saved).exists() for saved in _SAVED):
        return []
    files = _visible_files(root)
    if any(f.suffix in _FOR_DATASETS for f in files):
        return []
    if any(f.suffix in _JSON for f in files):  # a README beside data is its card, not a document
        files = [f for f in files if f.name.lower() != "readme.md"]
    return [f for f in files if f.suffix in _TEXT | _JSON]


def _read(file: Path, text_field: str) -> Iterator[str]:
    try:
        yield from _parse(file, text_field)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text: {error}") from error


def _parse(file: Path, text_field: str) -> Iterator[str]:
    if file.suffix in _TEXT:
        yield file.read_text(encoding="utf-8")
        return
    if file.suffix == ".json":
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(f"{file}: not JSON: {error}") from error
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
