"""Exports to transformers, which loads them in a child process.

This process never imports it: ``export_programs`` has what the child process runs.
"""

from pathlib import Path

import pytest

from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from tests.autotune.subjects.mlm.export.exports import PROGRAMS, export_to, run_python
from trainer.distributed.optimizer import learning_rate
from trainer.formats.train_config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ParallelSettings,
)

LOAD_ARGUMENTS = str(PROGRAMS / "load_arguments.py")
SHIPPED = sorted((Path(__file__).parents[5] / "profiles").glob("*.toml"))
"""Profiles in the repository."""
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
EXPORTED = [*(path.stem for path in SHIPPED), *VARIANTS]
"""Names of the exported profiles."""
NODES = 2
"""Nodes of every export."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return what transformers loads from exports, with their profiles, by name.

    The profiles are all that are shipped, and variants of the example. One process
    loads all, as importing transformers takes most of the time.
    """
    assert SHIPPED, "the repository has no profiles"
    directory = tmp_path_factory.mktemp("exports")
    profiles = {path.stem: path for path in SHIPPED}
    for name, changes in VARIANTS.items():
        train = {"max_steps": 40, "warmup_steps": 5, **changes}
        profiles[name] = directory / f"{name}.toml"
        profiles[name].write_text(profile_to_toml(but(example_profile(), train=train)))
    files = []
    for name, path in profiles.items():
        files.append(str(directory / f"{name}.json"))
        export_to("hf-trainer", path, "--out", files[-1], "--nodes", str(NODES))
    results = run_python(directory, LOAD_ARGUMENTS, *files)
    return {
        name: results[name] | {"profile": read_profile(path).profile}
        for name, path in profiles.items()
    }


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_takes_exported_values(loaded, name):
    arguments = loaded[name]["arguments"]
    train = loaded[name]["profile"].train
    assert arguments["max_steps"] == train.max_steps
    assert arguments["bf16"] == (train.precision == "bf16")
    assert arguments["dataloader_num_workers"] == train.data.num_workers
    assert arguments["torch_compile"] == train.compiled


@pytest.mark.parametrize("name", EXPORTED)
def test_step_has_at_least_a_sample_per_sequence(loaded, name):
    arguments = loaded[name]["arguments"]
    profile = loaded[name]["profile"]
    samples_per_rank = (
        arguments["per_device_train_batch_size"]
        * arguments["gradient_accumulation_steps"]
    )
    ranks = NODES * profile.local_ranks
    assert samples_per_rank * ranks >= profile.train.global_batch_size


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_has_our_learning_rates_after_warm_up(loaded, name):
    train = loaded[name]["profile"].train
    steps_after_warm_up = range(train.warmup_steps, train.max_steps)
    assert steps_after_warm_up
    ours = [learning_rate(train, step) for step in steps_after_warm_up]
    theirs = [loaded[name]["rates"][step] for step in steps_after_warm_up]
    # Both compute in fp64, in another order: the tolerance is far above its rounding.
    # The absolute one is for rates of 0 at the end of a schedule.
    assert theirs == pytest.approx(ours, rel=1e-9, abs=1e-15)


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
