"""Exports to accelerate and Lightning, whose code a child process runs.

This process never imports them: ``export_programs`` has what the child process runs.
"""

import pytest

from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from tests.autotune.subjects.mlm.export.exports import PROGRAMS, export_to, run_python
from trainer.formats.train_config import EvaluationSettings, ParallelSettings

RUN_CALLS = str(PROGRAMS / "run_calls.py")
CUDA = {"device": "cuda", "precision": "bf16"}
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
"""Settings of the exported profiles, by name."""
ACCELERATE_RANKS = {"alone": 1, "compile": 1, "fsdp2": 4, "ddp": 4}
"""Ranks of each export to accelerate, which launches only one process on CPUs."""
LIGHTNING_RANKS = {"alone": 1, "compile": 4, "fsdp2": 4, "ddp": 4}
"""Ranks of each export to Lightning."""


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
    for name in LAUNCHED:
        files["accelerate", name] = export_launched(
            directory, name, "accelerate", ACCELERATE_RANKS[name]
        )
        files["lightning", name] = export_launched(
            directory, name, "lightning", LIGHTNING_RANKS[name]
        )
    results = run_python(directory, RUN_CALLS, *files.values())
    return {key: results[file] for key, file in files.items()}


def test_exported_optimizer_has_both_groups(ran):
    for result in ran.values():
        decayed, others = result["groups"]
        assert decayed > 0
        assert others > 0


@pytest.mark.parametrize(
    ("name", "distributed_type"),
    [("alone", "NO"), ("compile", "NO"), ("fsdp2", "FSDP"), ("ddp", "MULTI_GPU")],
)
def test_accelerate_reads_its_distributed_type(ran, name, distributed_type):
    assert ran["accelerate", name]["distributed_type"] == distributed_type


def test_accelerate_reads_copies_of_the_weights(ran):
    # 4 ranks, of which 2 share the shards of a copy.
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
