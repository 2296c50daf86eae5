import subprocess
import sys
from pathlib import Path

from torchtitan.components.tokenizer import HuggingFaceTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_debug_assets.py"


def make(out: Path) -> str:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out)], check=True, capture_output=True, text=True
    ).stdout


def test_assets_are_deterministic_and_usable(tmp_path: Path) -> None:
    assert "Made" in make(tmp_path / "a")
    assert "Made" in make(tmp_path / "b")
    assert "Found" in make(tmp_path / "a")
    files = sorted(
        f.relative_to(tmp_path / "a") for f in (tmp_path / "a").rglob("*") if f.is_file()
    )
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path / "a" / "tokenizer"))
    assert 1000 < tokenizer.get_vocab_size() <= 2048
    tokens = tokenizer.encode("The import statement", add_bos=True, add_eos=True)
    assert tokens[0] == tokenizer.bos_id
    assert tokens[-1] == tokenizer.eos_id
    assert tokens.count(tokenizer.bos_id) == tokens.count(tokenizer.eos_id) == 1
    assert max(tokens) < 2048
    assert "import statement" in tokenizer.decode(tokens)
    assert len(tokens) < 10  # trained, not bytes


def test_processes_at_once_make_the_same_and_force_spares_other_files(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    (tmp_path / "mine.txt").write_text("not an asset")
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait(timeout=120) for p in running] == [0, 0]
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    first = tokenizer.read_bytes()
    subprocess.run([*command, "--force"], check=True, capture_output=True)
    assert tokenizer.read_bytes() == first
    assert (tmp_path / "mine.txt").exists()
    assert not list(tmp_path.glob(".making-*"))
    tokenizer.unlink()
    assert "Made" in make(tmp_path)
