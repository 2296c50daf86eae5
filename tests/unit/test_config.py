from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_ft.config import ConfigError, format_config, load_config
from torchtitan_ft.trainer import FaultTolerantTrainer, adapt_config

ROOT = Path(__file__).parents[2]
JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'


def load(path: Path, *overrides: str):
    return load_config(path, overrides, adapt=adapt_config)


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_values_types_and_sources(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'dump_folder = "here"\n'
        + JOB
        + """
[training]
steps = 7
max_norm = 2
[optimizer]
lr = 1e-3
beta2 = 0.9
[fault_tolerance]
overlap = 0.5
[dataloader]
dataset_path = "text"
shuffle = false
[validator.dataloader]
dataset = "c4_test"
[activation_checkpoint]
mode = "full"
""",
    )
    loaded = load(path)
    config = loaded.config
    assert isinstance(config, FaultTolerantTrainer.Config)
    assert (config.dump_folder, config.training.steps, config.training.max_norm) == ("here", 7, 2)
    group = config.optimizer.param_groups[0]
    assert group.optimizer_kwargs["lr"] == 1e-3
    assert group.optimizer_kwargs["betas"] == (0.9, 0.9)
    assert group.optimizer_kwargs["weight_decay"] == 0.1
    assert config.fault_tolerance.overlap == 0.5
    assert (config.dataloader.dataset_path, config.dataloader.shuffle) == ("text", False)
    assert config.validator.dataloader.dataset == "c4_test"
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert config.training.local_batch_size == 8  # the registry's
    assert loaded.sources["training.steps"] == str(path)
    assert "training.local_batch_size" not in loaded.sources


def test_command_line_over_file_over_base_over_registry(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(
        tmp_path, JOB + "[training]\nsteps = 1\nseq_len = 64\nlocal_batch_size = 3\n", "base.toml"
    )
    path = write(
        tmp_path / "deep",
        'base = "../base.toml"\n[training]\nsteps = 2\nseq_len = 32\n',
        "top.toml",
    )
    loaded = load(path, "--training.steps", "3")
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (3, 32, 3)
    assert training.max_norm == 1.0
    assert loaded.sources["training.steps"] == "command line"
    assert loaded.sources["training.seq_len"] == str(path)
    assert loaded.sources["training.local_batch_size"].endswith("base.toml")
    shown = {line.split(" = ")[0]: line for line in format_config(loaded).splitlines()}
    assert shown["training.steps"].endswith("# command line")
    assert "= 3 " in shown["training.steps"]
    assert shown["training.max_norm"].endswith("# registry")
    assert "llama3 debugmodel" in shown["model_spec"]


BROKEN = {
    "not toml": ("[job\n", ["not valid TOML", "line 1"]),
    "no job": ("[training]\nsteps = 1\n", ["[job] module is missing"]),
    "no config": ('[job]\nmodule = "llama3"\n', ["[job] config is missing"]),
    "unknown job key": ('[job]\nmodul = "llama3"\n', ["job.modul", "'module'"]),
    "unknown module": (
        '[job]\nmodule = "lama3"\nconfig = "x"\n',
        ["lama3", "neither", "did you mean 'llama3'"],
    ),
    "unknown config": (
        '[job]\nmodule = "llama3"\nconfig = "llama3_debug"\n',
        ["llama3_debug", "did you mean 'llama3_debugmodel'"],
    ),
    "unknown table": (JOB + "[trainig]\nsteps = 1\n", ["table 'trainig'", "'training'"]),
    "unknown key": (JOB + "[training]\nstep = 1\n", ["'training.step'", "'steps'"]),
    "unknown nested": (
        JOB + "[validator.dataloader]\ndatset = 'x'\n",
        ["validator.dataloader.datset"],
    ),
    "string for int": (
        JOB + '[training]\nsteps = "abc"\n',
        ["training.steps", "an integer", "'abc'"],
    ),
    "float for int": (JOB + "[training]\nsteps = 1.5\n", ["training.steps", "an integer", "1.5"]),
    "bool for int": (JOB + "[training]\nsteps = true\n", ["training.steps", "an integer", "True"]),
    "int for bool": (JOB + "[compile]\nenable = 1\n", ["compile.enable", "true or false"]),
    "not a choice": (
        JOB + '[training]\ndtype = "bfloat"\n',
        ["training.dtype", "'bfloat16', 'float32'", "did you mean 'bfloat16'"],
    ),
    "scalar for table": ("training = 3\n" + JOB, ["'training' is a table", "3"]),
    "list item": (JOB + "[compile]\ncomponents = [1]\n", ["compile.components[0]", "a string"]),
    "negative": (JOB + "[training]\nlocal_batch_size = 0\n", ["local_batch_size", "at least 1"]),
    "overlap": (
        JOB + "[fault_tolerance]\noverlap = 1.5\n",
        ["fault_tolerance", "[0.0, 1.0]", "1.5"],
    ),
    "bad domain": (JOB + '[fault_tolerance]\ndomain = "a b"\n', ["fault_tolerance.domain"]),
    "negative lr": (JOB + "[optimizer]\nlr = -1.0\n", ["optimizer.lr", "at least 0"]),
    "lr is text": (JOB + '[optimizer]\nlr = "high"\n', ["optimizer.lr", "a number"]),
    "ac mode": (
        JOB + '[activation_checkpoint]\nmode = "ful"\n',
        ["activation_checkpoint.mode", "'full'"],
    ),
    "group without name": (
        JOB + '[[optimizer.param_groups]]\npattern = ".*"\n',
        ["optimizer.param_groups[0]", "optimizer_name"],
    ),
    "torchtitan's own check": (JOB + '[checkpoint]\nfolder = ""\n', ["[checkpoint]", "folder"]),
    "torchft's key": (JOB + "[fault_tolerance]\ngroup_size = 2\n", ["group_size", "overlap"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    text, parts = BROKEN[name]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--training.steps", "abc"], ["training.steps", "abc"]),
        (["--training.stepz", "3"], ["training.stepz"]),
        (["--training.seq_len", "0"], ["command line", "training.seq_len", "at least 1"]),
        (["--fault_tolerance.overlap", "7"], ["[0.0, 1.0]"]),
    ],
)
def test_broken_command_line_is_one_clear_error(
    arguments: list[str], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, JOB), *arguments)
    for part in parts:
        assert part in str(error.value)


def test_missing_files_and_circles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml.*No such file"):
        load(tmp_path / "nothing.toml")
    a = write(tmp_path, 'base = "b.toml"\n', "a.toml")
    with pytest.raises(ConfigError, match=r"b\.toml.*base of.*No such file"):
        load(a)
    write(tmp_path, 'base = "a.toml"\n', "b.toml")
    with pytest.raises(ConfigError, match="in a circle"):
        load(a)


def test_error_inside_a_users_module_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_jobs.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, '[job]\nmodule = "my_broken_jobs"\nconfig = "x"\n')
    with pytest.raises(ConfigError, match=r"importing my_broken_jobs failed.*no_such_package"):
        load(path)


def test_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_jobs.py").write_text(
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "def small():\n"
        "    config = llama3_debugmodel()\n"
        "    config.training.steps = 3\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, '[job]\nmodule = "my_jobs"\nconfig = "small"\n')
    assert load(path).config.training.steps == 3


def test_file_of_torchtitan_0_2(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torchtitan_ft.config.loader"):
        config = load(ROOT / "tests/unit/data/llama3_debug_0_2.toml").config
    reports = [r.message for r in caplog.records if "torchtitan 0.2" in r.message]
    assert len(reports) == 1
    for part in (
        "[profiling] is [profiler]",
        "training.dataset is dataloader.dataset",
        "job.description",
    ):
        assert part in reports[0]
    assert config.model_spec is not None
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "debugmodel")
    assert config.dump_folder == "./old_outputs"
    assert (config.debug.print_config, config.debug.save_config_file) == (True, "config.json")
    assert (config.debug.seed, config.debug.deterministic) == (7, False)
    assert (config.profiler.enable_profiling, config.profiler.profile_freq) == (True, 10)
    assert config.hf_assets_path == "./assets/tokenizer"
    assert (config.dataloader.dataset, config.dataloader.dataset_path) == ("c4_test", "./somewhere")
    assert (config.validator.freq, config.validator.steps) == (5, 10)
    assert config.validator.dataloader.dataset == "c4_validation"
    assert config.training.disable_cuda_graphs
    assert config.optimizer.implementation == "foreach"
    (group,) = config.optimizer.param_groups
    assert group.optimizer_name == "AdamW"
    assert group.optimizer_kwargs == {
        "lr": 7e-4,
        "betas": (0.8, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.2,
    }
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert config.fault_tolerance.overlap == 0.25


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("[experimental]\ncustom_import = 'x'", "experimental"),
        ("[memory_estimation]\nenabled = true", "memory_estimation"),
        ("[quantize.linear.float8]\nrecipe_name = 'rowwise'", "quantize"),
        ("[model]\nconverters = ['float8']", "model.converters"),
        ("[model]\ntokenizer_path = 'x'", "model.tokenizer_path"),
        ("[optimizer]\nearly_step_in_backward = true", "optimizer.early_step_in_backward"),
        ("[parallelism]\ndisable_loss_parallel = true", "parallelism.disable_loss_parallel"),
        (
            "[parallelism]\ncontext_parallel_rotate_method = 'alltoall'",
            "parallelism.context_parallel_rotate_method",
        ),
        (
            "[parallelism]\nexpert_tensor_parallel_degree = 2",
            "parallelism.expert_tensor_parallel_degree",
        ),
        (
            "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'",
            "activation_checkpoint.selective_ac_option",
        ),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable"),
    ],
)
def test_keys_without_successor_are_refused_by_name(old: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, JOB + old + "\n"))
    assert f"'{name}'" in str(error.value)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda f: f.name
)
def test_shipped_files_load(file: Path) -> None:
    config = load(file).config
    assert config.model_spec is not None
    assert (
        config.fault_tolerance.overlap
        == {
            "llama3_debug": 0.0,
            "llama3_debug_ft": 0.25,
            "llama3_8b_ft": 0.125,
            "llama3_70b_ft": 0.05,
        }[file.stem]
    )


def test_importing_config_is_light() -> None:
    code = "import sys, torchtitan_ft.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
