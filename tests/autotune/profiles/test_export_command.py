"""``profile export``, whose files the real libraries load in child processes.

This process never imports them: ``export_programs`` has what the child processes run.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ParallelSettings,
)
from trainer.distributed.optimizer import learning_rate

SHIPPED = sorted(Path("profiles").resolve().glob("*.toml"))
CUDA = {"device": "cuda", "precision": "bf16"}
VARIANTS = {
    "fsdp2": {
        **CUDA,
        "parallel": ParallelSettings(strategy="fsdp2"),
        "activation_checkpointing": "full",
    },
    "zero1": {
        "parallel": ParallelSettings(
            strategy="zero1", bucket_cap_mib=100, static_graph=True
        )
    },
    "compile": {
        "compile": True,
        "data": DataSettings(num_workers=2, prefetch_factor=4),
    },
    "bucketed": {
        "layout": "bucketed",
        "activation_checkpointing": "selective",
        "evaluation": EvaluationSettings(interval_steps=9),
    },
    "tf32": {
        "device": "cuda",
        "tf32": True,
        "checkpoint": CheckpointSettings(enabled=False),
    },
    "wsd": {"schedule": "wsd", "final_learning_rate_share": 0.1},
    "wsd-long": {"schedule": "wsd", "decay_share": 1.0},
    "cosine": {"schedule": "cosine"},
    "cosine-to-share": {"schedule": "cosine", "final_learning_rate_share": 0.25},
    "linear-to-share": {"schedule": "linear", "final_learning_rate_share": 0.25},
    "constant": {"schedule": "constant", "warmup_steps": 0},
}
"""Settings of profiles that are exported to transformers, besides the shipped ones."""
PROGRAMS = Path(__file__).parent / "export_programs"
LOAD_ARGUMENTS = str(PROGRAMS / "load_arguments.py")
RUN_CALLS = str(PROGRAMS / "run_calls.py")
LAUNCHED = {
    "alone": {},
    "compile": {"compile": True, "activation_checkpointing": "full"},
    "fsdp2": {
        **CUDA,
        "parallel": ParallelSettings(strategy="fsdp2", shard_ranks=2),
        "activation_checkpointing": "full",
    },
    "ddp": {
        **CUDA,
        "parallel": ParallelSettings(gradient_dtype="bf16", bucket_cap_mib=50),
    },
}
"""Settings of profiles that are exported to accelerate and Lightning."""


def export_to(target, profile, *options):
    """Export a profile, which must succeed."""
    assert run(["profile", "export", str(profile), "--to", target, *options]) == 0


def run_python(directory, *arguments):
    """Run Python in a directory; return the JSON value of its last line."""
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return what transformers loads from exports, with their profiles, by name.

    The profiles are all that are shipped, and variants of the example. One process
    loads all, as importing transformers takes most of the time.
    """
    directory = tmp_path_factory.mktemp("exports")
    profiles = {path.stem: path for path in SHIPPED}
    for name, changes in VARIANTS.items():
        train = {"max_steps": 40, "warmup_steps": 5, **changes}
        profiles[name] = directory / f"{name}.toml"
        profiles[name].write_text(profile_to_toml(but(example_profile(), train=train)))
    files = []
    for name, path in profiles.items():
        files.append(str(directory / f"{name}.json"))
        export_to("hf-trainer", path, "--out", files[-1], "--nodes", "2")
    results = run_python(directory, LOAD_ARGUMENTS, *files)
    return {
        name: results[name] | {"profile": read_profile(path).profile}
        for name, path in profiles.items()
    }


EXPORTED = [*(path.stem for path in SHIPPED), *VARIANTS]
"""Names of the results of ``loaded``."""


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_takes_every_value(loaded, name):
    arguments = loaded[name]["arguments"]
    profile = loaded[name]["profile"]
    train = profile.train
    assert arguments["max_steps"] == train.max_steps
    assert arguments["bf16"] == (train.precision == "bf16")
    assert arguments["dataloader_num_workers"] == train.data.num_workers
    assert arguments["torch_compile"] == train.compiled
    samples_per_rank = (
        arguments["per_device_train_batch_size"]
        * arguments["gradient_accumulation_steps"]
    )
    # A step has at least as many samples as sequences.
    assert samples_per_rank * 2 * profile.local_ranks >= train.global_batch_size


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_has_our_learning_rates_after_warm_up(loaded, name):
    train = loaded[name]["profile"].train
    ours = [learning_rate(train, step) for step in range(train.max_steps)]
    first = train.warmup_steps
    assert loaded[name]["rates"][first:] == pytest.approx(
        ours[first:], rel=1e-9, abs=1e-15
    )


def test_transformers_takes_all_of_fsdp(loaded):
    arguments = loaded["fsdp2"]["arguments"]
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"]["version"] == 2
    assert arguments["fsdp_config"]["activation_checkpointing"] is True
    assert arguments["gradient_checkpointing"] is False


def test_only_checkpointing_has_a_deprecated_name(loaded):
    warnings = loaded["bucketed"]["warnings"]
    assert any("gradient_checkpointing" in warning for warning in warnings)
    warned = [name for name, result in loaded.items() if result["warnings"]]
    assert warned == ["bucketed"]


@pytest.fixture
def packed(workdir):
    """Write a profile of packed sequences."""
    train = {"layout": "packed", "seq_length_tokens": 64, "global_batch_size": 32}
    profile = but(example_profile(), train=train)
    (workdir / "p.toml").write_text(profile_to_toml(profile))


def test_counts_samples_of_packed_sequences(packed, capsys, patterned_dataset):
    data = ("--data", str(patterned_dataset))
    export_to("hf-trainer", "p.toml", *data, "--json")
    out, err = capsys.readouterr()
    assert err == ""
    batch = json.loads(out)["batch"]
    # 24.5 tokens and two special ones, in sequences of 64.
    assert 2 < batch["samples_per_sequence"] < 3
    wanted = 32 * batch["samples_per_sequence"]
    difference = abs(batch["exported_samples_per_step"] - wanted)
    assert difference <= 0.5 * batch["gradient_accumulation_steps"] + 0.5
    assert batch["exported_tokens_per_step"] == pytest.approx(
        batch["tokens_per_step"], rel=0.3
    )


def test_export_prints_settings_with_remarks_on_stderr(packed, capsys):
    export_to("hf-trainer", "p.toml")
    out, err = capsys.readouterr()
    assert json.loads(out)["per_device_train_batch_size"] == 2
    for words in (
        "No equivalent:",
        "cross-document attention",
        "warning: The number of samples per",
        "--data",
    ):
        assert words in err


def test_export_writes_settings_with_remarks(packed, workdir, says, capsys):
    export_to("hf-trainer", "p.toml")
    printed = json.loads(capsys.readouterr().out)
    export = ("profile", "export", "p.toml", "--to", "hf-trainer")
    assert "hf/settings.remarks.json" in says(*export, "--out", "hf/settings.json")
    settings = json.loads((workdir / "hf/settings.json").read_text())
    remarks = json.loads((workdir / "hf/settings.remarks.json").read_text())
    assert remarks["arguments"] == settings == printed
    lost = {
        setting["setting"]
        for setting in remarks["settings"]
        if setting["equivalence"] == "none"
    }
    assert lost >= {"layout", "mlm_head"}


def test_rejects_unknown_target(packed, says):
    export = ("profile", "export", "p.toml", "--to", "axolotl")
    assert "hf-trainer" in says(*export, code=2)


def export_launched(directory, name, target, ranks):
    """Export a profile of ``LAUNCHED``; return the path of its file of settings."""
    train = {"evaluation": EvaluationSettings(interval_steps=9), **LAUNCHED[name]}
    profile = directory / f"{name}.toml"
    profile.write_text(profile_to_toml(but(example_profile(), train=train)))
    file = str(directory / f"{target}-{name}.json")
    export_to(target, profile, "--out", file, "--ranks", str(ranks))
    return file


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return what the code of exports makes, by target and name of the profile.

    One process runs the code of all, as importing the libraries takes most of the time.
    """
    directory = tmp_path_factory.mktemp("calls")
    files = {}
    for name, train in LAUNCHED.items():
        # On CPUs, accelerate launches one process only.
        ranks = 4 if "device" in train else 1
        files["accelerate", name] = export_launched(
            directory, name, "accelerate", ranks
        )
        ranks = 1 if name == "alone" else 4
        files["lightning", name] = export_launched(directory, name, "lightning", ranks)
    results = run_python(directory, RUN_CALLS, *files.values())
    return {key: results[file] for key, file in files.items()}


def test_exported_optimizer_has_both_groups(ran):
    # Parameters with weight decay and without.
    assert all(0 not in result["groups"] for result in ran.values())


@pytest.mark.parametrize(
    ("name", "distributed_type"),
    [("alone", "NO"), ("compile", "NO"), ("fsdp2", "FSDP"), ("ddp", "MULTI_GPU")],
)
def test_accelerate_reads_its_distributed_type(ran, name, distributed_type):
    assert ran["accelerate", name]["distributed_type"] == distributed_type


def test_accelerate_reads_copies_of_the_weights(ran):
    parallelism = ran["accelerate", "fsdp2"]["parallelism_config"]
    assert parallelism["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("alone", "SingleDeviceStrategy"),
        ("compile", "DDPStrategy"),
        # Without a GPU, no Trainer for one is made.
        ("fsdp2", None),
        ("ddp", None),
    ],
)
def test_lightning_makes_its_strategy(ran, name, strategy):
    assert ran["lightning", name].get("strategy") == strategy


def test_accelerate_launches_exported_calls(workdir):
    file = export_launched(workdir, "compile", "accelerate", ranks=1)
    launch = ("-m", "accelerate.commands.launch", "--config_file", file)
    results = run_python(workdir, *launch, RUN_CALLS, file)
    assert results[file]["backend"] == "INDUCTOR"
