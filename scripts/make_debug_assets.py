"""Make what the debug job reads, with no network: a small real English corpus and a tokenizer.

    python scripts/make_debug_assets.py [--out assets]

The corpus is the documentation that every Python carries (``pydoc_data.topics``, about 465 kB), one
JSON line a topic; the tokenizer a byte-level BPE of 2,000 tokens trained on it. The same Python makes
the same bytes. Does nothing when they are there; safe when several processes run it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

VOCABULARY = 2000
FILES = (
    "corpus/python_topics.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "complete",
)
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def corpus() -> list[str]:
    """The texts, in a fixed order."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train on ``texts`` and write tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(out: Path) -> bool:
    """Make the assets in ``out``; False if they are there already."""
    if all((out / name).is_file() for name in FILES):
        return False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as folder:
        work, texts = Path(folder), corpus()
        (work / "corpus").mkdir()
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
        (work / "corpus" / "python_topics.jsonl").write_text(lines, encoding="utf-8")
        write_tokenizer(work / "tokenizer", texts)
        for name in ("corpus", "tokenizer"):
            (out / name).mkdir(exist_ok=True)
            for file in (work / name).iterdir():
                os.replace(file, out / name / file.name)  # another process made the same bytes
    (out / "complete").touch()
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "assets")
    parser.add_argument("--force", action="store_true", help="make them anew")
    options = parser.parse_args()
    if options.force:
        for name in FILES:  # only what we made: --out may be any folder
            (options.out / name).unlink(missing_ok=True)
    made = make(options.out)
    print(f"{'Made' if made else 'Found'} the debug assets in {options.out}")


if __name__ == "__main__":
    main()
