from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from torchtitan_ft.config import ConfigError, format_config, load_config
from torchtitan_ft.config.fields import convert
from torchtitan_ft.trainer import FaultTolerantTrainer, adapt_config

ROOT = Path(__file__).parents[2]
JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'


def load(path: Path, *overrides: str):
    return load_config(path, overrides, adapt=adapt_config)


def write(folder: Path, text: str | bytes, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
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
    assert loaded.sources["training.local_batch_size"] == "registry"
    assert loaded.sources["optimizer.param_groups.0.optimizer_kwargs.lr"] == str(path)
    assert loaded.sources["optimizer.param_groups.0.optimizer_kwargs.eps"] == "registry"
    assert loaded.sources["activation_checkpoint"] == str(path)
    assert loaded.sources["fault_tolerance.overlap"] == str(path)
    assert loaded.sources["fault_tolerance.domains"] == "registry"


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


BROKEN: dict[str, tuple[str | bytes, list[str]]] = {
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
    "nan": (JOB + "[optimizer]\nlr = nan\n", ["optimizer.lr", "at least 0", "nan"]),
    "beta": (JOB + "[optimizer]\nbeta1 = 1.0\n", ["optimizer.betas", "[0, 1)"]),
    "unknown optimizer": (
        JOB + '[optimizer]\nname = "AdamX"\n',
        ["optimizer.name", "'AdamX'", "did you mean 'Adam"],
    ),
    "unknown argument of the optimizer": (
        JOB
        + '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "AdamW"\n'
        + "optimizer_kwargs = {l = 0.1}\n",
        ["optimizer_kwargs.l)", "no argument of AdamW", "did you mean 'lr'"],
    ),
    "bad pattern": (
        JOB + '[[optimizer.param_groups]]\npattern = "("\noptimizer_name = "AdamW"\n',
        ["optimizer.param_groups.0.pattern", "regular expression"],
    ),
    "unknown field of a group": (
        JOB + '[[optimizer.param_groups]]\npatern = ".*"\noptimizer_name = "AdamW"\n',
        ["optimizer.param_groups[0].patern", "did you mean 'pattern'"],
    ),
    "short key and groups": (
        JOB
        + '[optimizer]\nlr = 1.0\n[[optimizer.param_groups]]\npattern = ".*"\n'
        + 'optimizer_name = "AdamW"\n',
        ["optimizer.lr", "single group"],
    ),
    "schedule": (
        JOB + '[parallelism]\npipeline_parallel_schedule = "2F1B"\n',
        ["parallelism.pipeline_parallel_schedule", "'2F1B'", "1F1B"],
    ),
    "degree": (
        JOB + "[parallelism]\ntensor_parallel_degree = 0\n",
        ["parallelism.tensor_parallel_degree", "at least 1"],
    ),
    "shard degree": (
        JOB + "[parallelism]\ndata_parallel_shard_degree = 0\n",
        ["parallelism.data_parallel_shard_degree", "-1 or at least 1"],
    ),
    "global batch": (JOB + "[training]\nglobal_batch_size = 0\n", ["training.global_batch_size"]),
    "max norm": (JOB + "[training]\nmax_norm = 0.0\n", ["training.max_norm", "above 0"]),
    "steps": (JOB + "[training]\nsteps = -1\n", ["training.steps", "at least 0"]),
    "log frequency": (JOB + "[metrics]\nlog_freq = 0\n", ["metrics.log_freq", "at least 1"]),
    "decay": (JOB + "[lr_scheduler]\ndecay_ratio = 1.5\n", ["lr_scheduler.decay_ratio", "[0, 1]"]),
    "warmup": (JOB + "[lr_scheduler]\nwarmup_steps = -1\n", ["lr_scheduler.warmup_steps"]),
    "torchtitan's assertion": (JOB + "[validator]\nsteps = 0\n", ["[validator]", "steps"]),
    "checks across tables": (
        JOB + "[debug]\nbatch_invariant = true\n",
        ["the settings together", "Batch-invariant"],
    ),
    "scalar for our table": ("fault_tolerance = 3\n" + JOB, ["'fault_tolerance' is a table"]),
    "scalar for optimizer": ("optimizer = 3\n" + JOB, ["'optimizer' is a table"]),
    "code is no setting": (JOB + "[model_spec]\nname = 'x'\n", ["unknown table 'model_spec'"]),
    "ac mode is a list": (
        JOB + '[activation_checkpoint]\nmode = ["full"]\n',
        ["activation_checkpoint.mode", "['full']"],
    ),
    "ac key of another mode": (
        JOB + '[activation_checkpoint]\nmode = "full"\nmemory_budget = 0.5\n',
        ["unknown key 'activation_checkpoint.memory_budget'"],
    ),
    "ac key without checkpointing": (
        JOB + '[activation_checkpoint]\nmode = "none"\ndebug = true\n',
        ["activation_checkpoint.debug", "mode 'none'"],
    ),
    "empty module": ('[job]\nmodule = ""\nconfig = "x"\n', ["job.module", "a name"]),
    "relative module": ('[job]\nmodule = ".x"\nconfig = "x"\n', ["job] module '.x'"]),
    "not utf-8": (b"\xff = 1\n", ["not valid UTF-8"]),
    "base is no name": ("base = 3\n" + JOB, ["'base' must be the name of a file", "3"]),
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
        (["--fault_tolerance.overlap", "7"], ["fault_tolerance.overlap", "[0.0, 1.0]"]),
        (["--training.stepz", "3"], ["did you mean '--training.steps'"]),
        (["--training.dtype", "float3"], ["training.dtype", "'float3'", "'bfloat16'"]),
        (["--training.steps"], ["training.steps", "Missing value"]),
        (["--validator.steps", "0"], ["validation steps must be positive or -1"]),
        (["--optimizer.param_groups.0.optimizer_kwargs.lr", "-1"], ["optimizer.lr", "at least 0"]),
        (["activation-checkpoint:ful"], ["activation-checkpoint:ful"]),
    ],
)
def test_broken_command_line_is_one_clear_error(
    arguments: list[str], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, JOB), *arguments)
    message = str(error.value)
    assert message.startswith("command line: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_command_line_names_its_settings(tmp_path: Path) -> None:
    loaded = load(
        write(tmp_path, JOB + "[training]\ngc_debug = true\n"),
        "--training.steps=10",  # what it was already
        "--training.no-gc-debug",
        "--fault-tolerance.domains",
        "3",
        "--dataloader.no-shuffle",
        "--dump_folder",
        "elsewhere",
        "--optimizer.param-groups.0.optimizer-kwargs.lr",
        "0.5",
        "activation-checkpoint:full",
    )
    config, sources = loaded.config, loaded.sources
    assert (config.training.steps, config.training.gc_debug) == (10, False)
    assert (config.dataloader.shuffle, config.fault_tolerance.domains) == (False, 3)
    assert config.dump_folder == "elsewhere"
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.5
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert {p for p, s in sources.items() if s == "command line"} >= {
        "training.steps",
        "training.gc_debug",
        "fault_tolerance.domains",
        "dataloader.shuffle",
        "dump_folder",
        "optimizer.param_groups.0.optimizer_kwargs.lr",
    }
    assert sources["training.seq_len"] == "registry"


def test_help_shows_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(write(tmp_path, JOB), "--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--training.steps", "--fault-tolerance.overlap", "--dataloader.dataset-path"):
        assert part in shown


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
    with pytest.raises(ConfigError, match=r"importing my_broken_jobs.*failed.*no_such_package"):
        load(path)


@pytest.mark.parametrize(
    ("code", "name", "parts"),
    [
        ("def small(:\n", "small", ["SyntaxError"]),
        ("raise RuntimeError('no luck')\n", "small", ["RuntimeError: no luck"]),
        ("def small(size):\n    pass\n", "small", ["small() failed", "size"]),
        ("def small():\n    return 3\n", "small", ["returned int, no Trainer.Config"]),
        ("def small():\n    pass\n", "smal", ["'smal' is not in", "did you mean 'small'"]),
        ("small = 3\n", "small", ["'small' is not in"]),
    ],
)
@pytest.mark.parametrize("package", [False, True])
def test_errors_of_a_users_module(
    package: bool,
    code: str,
    name: str,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package:
        (tmp_path / "my_jobs").mkdir()
        (tmp_path / "my_jobs" / "__init__.py").touch()
        (tmp_path / "my_jobs" / "config_registry.py").write_text(code)
    else:
        (tmp_path / "my_jobs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, f'[job]\nmodule = "my_jobs"\nconfig = "{name}"\n')
    try:
        with pytest.raises(ConfigError) as error:
            load(path)
    finally:
        forget("my_jobs")
    for part in ["job.toml", "[job]", *parts]:
        assert part in str(error.value)


def forget(package: str) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        del sys.modules[name]


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
    try:
        assert load(path).config.training.steps == 3
    finally:
        forget("my_jobs")


def test_a_job_of_another_trainer(tmp_path: Path) -> None:
    def adapt(config):
        raise TypeError("unexpected field 'encoder'")

    with pytest.raises(ConfigError, match=r"job\.toml.*'llama3' cannot be used.*encoder"):
        load_config(write(tmp_path, JOB), adapt=adapt)


def test_checks_see_all_files_together(tmp_path: Path) -> None:
    # Neither file is valid without the other: asynchronous tensor parallelism needs the compiler.
    write(tmp_path, JOB + "[compile]\nenable_async_tensor_parallel = true\n", "base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[compile]\nenable = true\n', "top.toml")
    assert load(path).config.compile.enable_async_tensor_parallel
    with pytest.raises(ConfigError, match=r"base\.toml: \[compile\]: Async TP requires"):
        load(tmp_path / "base.toml")


def test_job_is_inherited_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, JOB, "base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[job]\nconfig = "llama3_8b"\n', "top.toml")
    assert load(path).config.model_spec.flavor == "8B"
    path = write(tmp_path, 'base = "base.toml"\n[job]\nconfig = "llama3_9b"\n', "top.toml")
    with pytest.raises(ConfigError, match=r"top\.toml.*'llama3_9b'.*did you mean 'llama3_[78]"):
        load(path)


def test_optimizer_over_a_base(tmp_path: Path) -> None:
    groups = (
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "Adam"\n'
        "optimizer_kwargs = {lr = 0.5, betas = [0.5, 0.6]}\n"
    )
    write(tmp_path, JOB + groups, "base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[optimizer]\nbeta2 = 0.7\n', "top.toml")
    (group,) = load(path).config.optimizer.param_groups
    assert group.optimizer_name == "Adam"
    assert group.optimizer_kwargs == {"lr": 0.5, "betas": (0.5, 0.7)}
    write(tmp_path, JOB + "[optimizer]\nlr = 0.25\n", "base.toml")
    path = write(tmp_path, 'base = "base.toml"\n' + groups, "top.toml")
    loaded = load(path)
    (group,) = loaded.config.optimizer.param_groups
    assert group.optimizer_kwargs == {"lr": 0.5, "betas": [0.5, 0.6]}
    assert loaded.sources["optimizer.param_groups.0.optimizer_kwargs.lr"] == str(path)


def test_activation_checkpoint_over_a_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        JOB + '[activation_checkpoint]\nmode = "selective"\n'
        'preserve_rng_state = false\nforce_recompute_mm_shapes_by_fqns = ["x"]\n',
        "base.toml",
    )

    def over(table: str):
        text = 'base = "base.toml"\n[activation_checkpoint]\n' + table
        return load(write(tmp_path, text, "top.toml"))

    kept = over("debug = true\n").config.activation_checkpoint
    assert (kept.debug, kept.preserve_rng_state) == (True, False)
    assert kept.force_recompute_mm_shapes_by_fqns == ["x"]
    other = over('mode = "full"\n')
    assert type(other.config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert other.config.activation_checkpoint.preserve_rng_state
    assert other.sources["activation_checkpoint.preserve_rng_state"].endswith("top.toml")
    assert "activation_checkpoint = FullAC " in format_config(other)
    off = over('mode = "none"\n')
    assert off.config.activation_checkpoint is None
    assert off.sources["activation_checkpoint"].endswith("top.toml")
    text = JOB + '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true\n'
    budget = load(write(tmp_path, text)).config.activation_checkpoint
    assert type(budget).__qualname__ == "MemoryBudgetAC.Config"


def test_the_registrys_config_is_left_alone(tmp_path: Path) -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    base = llama3_debugmodel()
    text = JOB + '[training]\nsteps = 3\n[activation_checkpoint]\nmode = "none"\n'
    config = load_config(write(tmp_path, text), adapt=lambda _: base).config
    assert (config.training.steps, config.activation_checkpoint) == (3, None)
    assert base.activation_checkpoint is not None
    assert base.training == llama3_debugmodel().training


def test_every_field_is_shown_with_its_source(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, JOB + "[optimizer]\nlr = 0.5\n"))
    lines = format_config(loaded).splitlines()
    shown = {line.split(" = ")[0] for line in lines}
    assert shown == set(loaded.sources)
    assert {"fault_tolerance.overlap", "validator.dataloader.dataset", "loss.num_chunks"} <= shown
    (lr,) = [line for line in lines if "optimizer_kwargs.lr" in line]
    assert "= 0.5 " in lr
    assert lr.endswith("job.toml")


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, 1.0),
        (1, float | int, 1),
        ("none", str | None, None),
        ("none", str | int, "none"),
        (["a", "b"], list[str], ["a", "b"]),
        (["a", {"k": 1}], str | tuple[str, dict[str, int]], ("a", {"k": 1})),
        ([["a"], []], list[list[str]] | None, [["a"], []]),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        (2, Literal[1, 2], 2),
    ],
)
def test_convert(value: object, annotation: object, expected: object) -> None:
    result = convert(value, annotation, file="f", path="p")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, float),
        (True, int),
        (True, Literal[1, 2]),
        ("a", list[str]),
        ([1], list[str]),
        (["a"], tuple[str, int]),
        ({"a": "b"}, dict[str, int]),
        (1.0, int | None),
        (datetime.date(2020, 1, 1), str),
    ],
)
def test_convert_refuses(value: object, annotation: object) -> None:
    with pytest.raises(ConfigError, match="f: 'p"):
        convert(value, annotation, file="f", path="p")


SHIPPED = {  # overlap, domains, ranks of a domain
    "llama3_debug": (0.0, 1, -1),
    "llama3_debug_ft": (0.25, 4, -1),
    "llama3_8b_ft": (0.125, 8, 8),
    "llama3_70b_ft": (0.05, 64, 8),
}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda f: f.name
)
def test_shipped_files_load(file: Path) -> None:
    config = load(file).config
    ft, parallel = config.fault_tolerance, config.parallelism
    ranks = (
        parallel.data_parallel_replicate_degree
        * parallel.data_parallel_shard_degree
        * parallel.tensor_parallel_degree
        * parallel.pipeline_parallel_degree
        * parallel.context_parallel_degree
    )
    assert (ft.overlap, ft.domains, ranks) == SHIPPED[file.stem]
    assert config.debug.seed is not None
    if "debug" not in file.stem:
        assert config.checkpoint.enable
        assert not config.checkpoint.last_save_model_only  # could not be resumed
        assert config.training.seq_len == 8192
        assert config.training.mixed_precision_param == "bfloat16"
        rows = config.training.local_batch_size * ranks * ft.domains
        assert config.training.global_batch_size % rows == 0


def test_importing_config_is_light() -> None:
    code = (
        "import sys, torchtitan_ft.config; "
        "sys.exit(bool({'torch', 'torchtitan', 'tyro'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
