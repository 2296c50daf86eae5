"""Files written for torchtitan 0.2."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torchtitan_ft.config import ConfigError, LoadedConfig, load_config
from torchtitan_ft.trainer import adapt_config

FILE = Path(__file__).parent / "data" / "llama3_debug_0_2.toml"
JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'


def load(folder: Path, text: str) -> LoadedConfig:
    path = folder / "job.toml"
    path.write_text(text)
    return load_config(path, adapt=adapt_config)


def test_a_whole_file(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torchtitan_ft.config.loader"):
        loaded = load_config(FILE, adapt=adapt_config)
    config = loaded.config
    reports = [r.message for r in caplog.records if "torchtitan 0.2" in r.message]
    assert len(reports) == 1
    for part in (
        "[profiling] is [profiler]",
        "training.dataset is dataloader.dataset",
        "job.description is ignored",
        "parallelism.disable_loss_parallel is ignored",
        "[fault_tolerance] of torchft is ignored",
    ):
        assert part in reports[0]
    assert config.model_spec is not None
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "debugmodel")
    assert type(config.loss).__qualname__ == "ChunkedLossWrapper.Config"
    assert config.dump_folder == "./old_outputs"
    assert loaded.sources["dump_folder"] == str(FILE)
    assert (config.debug.print_config, config.debug.save_config_file) == (True, "config.json")
    assert (config.debug.seed, config.debug.deterministic_warn_only) == (7, True)
    assert (config.profiler.enable_profiling, config.profiler.profiler_active) == (True, 2)
    assert config.metrics.log_freq == 3
    assert config.hf_assets_path == "./assets/tokenizer"
    assert (config.dataloader.dataset, config.dataloader.dataset_path) == ("c4_test", "./somewhere")
    assert (config.validator.freq, config.validator.steps) == (5, 10)
    assert config.validator.dataloader.dataset == "c4_validation"
    assert config.validator.dataloader.dataset_path == "./elsewhere"
    assert config.validator.dataloader.num_workers == 1
    assert config.training.disable_cuda_graphs
    assert (config.training.seq_len, config.training.local_batch_size) == (512, 4)
    assert config.lr_scheduler.total_steps == 40
    assert config.comm.init_timeout_seconds == 200
    assert config.optimizer.implementation == "foreach"
    (group,) = config.optimizer.param_groups
    assert (group.pattern, group.optimizer_name) == (".*", "AdamW")
    assert group.optimizer_kwargs == {
        "lr": 7e-4,
        "betas": (0.8, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.2,
    }
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert config.activation_checkpoint.preserve_rng_state is False
    assert config.fault_tolerance.overlap == 0.25


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("[experimental]\ncustom_import = 'x'", "experimental"),
        ("[memory_estimation]\nenable = true", "memory_estimation"),
        (
            "[model]\nconverters = ['float8']\n[quantize.linear.float8]\nrecipe_name = 'rowwise'",
            "model.converters",
        ),
        ("[model]\ntokenizer_path = 'x'", "model.tokenizer_path"),
        ("[model]\nprint_after_conversion = true", "model.print_after_conversion"),
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
            "[parallelism]\npipeline_parallel_expert_parallel_overlap = false",
            "parallelism.pipeline_parallel_expert_parallel_overlap",
        ),
        (
            "[parallelism]\npipeline_parallel_split_points = ['layers.2']",
            "parallelism.pipeline_parallel_split_points",
        ),
        (
            "[parallelism]\nexpert_parallel_comm_backend = 'deepep'",
            "parallelism.expert_parallel_comm_backend",
        ),
        ("[activation_checkpoint]\nearly_stop = true", "activation_checkpoint.early_stop"),
        (
            "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'",
            "activation_checkpoint.selective_ac_option",
        ),
        ("[validation]\nenable = true\nseq_len = 9", "validator.seq_len"),
        ("[validation]\nenable = true\nlocal_batch_size = 9", "validator.local_batch_size"),
        ("[training.dataloader]\nnum_workers = 2", "dataloader.num_workers"),
        ("[fault_tolerance]\nenable = true", "fault_tolerance.enable"),
        ("[fault_tolerance]\nprocess_group = 'nccl'", "fault_tolerance.process_group"),
        (
            "[fault_tolerance]\nprocess_group_timeout_ms = 5",
            "fault_tolerance.process_group_timeout_ms",
        ),
        ("[fault_tolerance]\nreplica_id = 1", "fault_tolerance.replica_id"),
        ("[fault_tolerance]\ngroup_size = 2", "fault_tolerance.group_size"),
        ("[fault_tolerance]\nmin_replica_size = 2", "fault_tolerance.min_replica_size"),
        ("[fault_tolerance]\nsemi_sync_method = 'diloco'", "fault_tolerance.semi_sync_method"),
        ("[fault_tolerance]\nenable = false\noverlap = 0.5", "fault_tolerance.enable"),
    ],
)
def test_keys_without_successor_are_refused_by_name(old: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, JOB + old + "\n")
    assert f"'{name}'" in str(error.value)
    assert "job.toml" in str(error.value)


def test_job_keys_without_successor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'job\.custom_config_module'.*\[job\] module"):
        load(tmp_path, JOB + "custom_config_module = 'mine'\n")


def test_renamed_keys(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        JOB
        + """
[training]
seed = 3
deterministic = true
[parallelism]
enable_async_tensor_parallel = true
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
per_op_sac_force_recompute_mm_shapes_by_fqns = ["x"]
""",
    ).config
    assert (config.debug.seed, config.debug.deterministic) == (3, True)
    assert config.compile.enable_async_tensor_parallel
    assert config.activation_checkpoint.force_recompute_mm_shapes_by_fqns == ["x"]


def test_both_names_of_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'training.dataset' is the old name of 'dataloader"):
        load(tmp_path, JOB + "[training]\ndataset = 'a'\n[dataloader]\ndataset = 'b'\n")


def test_cuda_graphs(tmp_path: Path) -> None:
    old = JOB + "[profiling]\nprofile_freq = 20\n"
    assert load(tmp_path, old).config.training.disable_cuda_graphs
    kept = old + "[training]\ndisable_cuda_graphs = false\n"
    assert not load(tmp_path, kept).config.training.disable_cuda_graphs
    new = tmp_path / "new.toml"  # adapt_config switches them off where there is no GPU
    new.write_text(JOB + "[profiler]\nprofile_freq = 20\n")
    assert not load_config(new).config.training.disable_cuda_graphs


@pytest.mark.parametrize("scalar", ["job", "training", "debug", "profiling", "fault_tolerance"])
def test_a_scalar_where_a_table_belongs(scalar: str, tmp_path: Path) -> None:
    text = f"{scalar} = 3\n" + (JOB + "print_config = true\n" if scalar != "job" else "")
    with pytest.raises(ConfigError, match=scalar):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("model", "spec", "vocabulary"),
    [
        ('name = "llama3"\nflavor = "8B"', ("llama3", "8B"), 128256),
        ('name = "llama3"\nflavor = "1B"', ("llama3", "1B"), 128256),  # no registry function
        ('name = "llama3"\nflavor = "debugmodel"', ("llama3", "debugmodel"), 2048),
    ],
)
def test_model_table(model: str, spec: tuple[str, str], vocabulary: int, tmp_path: Path) -> None:
    config = load(tmp_path, f"[model]\n{model}\n").config
    assert config.model_spec is not None
    assert (config.model_spec.name, config.model_spec.flavor) == spec
    assert config.loss.loss_fn.global_vocab_size == vocabulary


def test_flavor_over_a_registry_function(tmp_path: Path) -> None:
    config = load(tmp_path, JOB + '[model]\nflavor = "8B"\n').config
    assert config.model_spec.flavor == "8B"
    assert config.metrics.log_freq == 1  # the function's


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ('name = "llama3"\nflavor = "8b"', ["model.flavor", "'8b'", "did you mean '8B'"]),
        ('name = "llama4"\nflavor = "8B"', ["'llama4'", "did you mean 'llama3'"]),
        ('name = "llama3"', ["[job] config is missing"]),
        ("name = 3", ["'model.name'", "a string"]),
        ('name = "llama3"\nflavour = "8B"', ["'model.flavour'", "did you mean 'flavor'"]),
    ],
)
def test_wrong_model_table(model: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f"[model]\n{model}\n")
    for part in parts:
        assert part in str(error.value)
