import shlex

import pytest

from autotune.profiles.decide.follow_up import (
    command,
    probe_command,
    repeated_probe_command,
)
from testbed.examples.profiles import but, example_profile


def probe_of_example(train=None, **options):
    """Return the probe command of the example with other settings.

    Args:
        train: Settings that replace the example's.
        options: Options of the command to add or replace.
    """
    profile = but(example_profile(), train=train or {})
    return repeated_probe_command(profile.train, profile, **options)


def test_command_leaves_out_defaults():
    options = {"max_micro_batch_size": 16_384, "seq_length": 512, "memory": None}
    assert command("probe", **options) == "autotune probe"


def test_command_repeats_options_of_lists():
    assert (
        command("probe", model=["a", "b"], accumulate=False)
        == "autotune probe --model a --model b --no-accumulate"
    )


def test_command_quotes_arguments():
    assert (
        command("train", "my p.toml", slurm=True)
        == "autotune train 'my p.toml' --slurm"
    )


def test_probe_command_repeats_a_profiles_settings():
    # Packing is the default of this model, so that no option names the layout.
    assert (
        probe_of_example({"layout": "packed"}, model="tiny.json", out="p.toml")
        == "autotune probe --model tiny.json --data DIR --device cpu --memory 1GiB"
        " --global-batch-tokens 4096 --no-accumulate --ranks 1 --out p.toml"
    )


@pytest.mark.parametrize(
    ("train", "option"),
    [
        pytest.param({"seq_length_tokens": 128}, "--seq-length 128", id="length"),
        pytest.param({"layout": "padded"}, "--layout padded", id="layout"),
        pytest.param({"precision": "bf16"}, "--precision bf16", id="precision"),
        pytest.param(
            {"attention_dropout": 0.0}, "--attention-dropout 0.0", id="dropout"
        ),
        pytest.param(
            {"activation_checkpointing": "full"},
            "--activation-checkpointing full",
            id="checkpointing",
        ),
        pytest.param({"compile": True}, "--compile", id="compile"),
        pytest.param({"device": "cuda"}, "--device cuda", id="device"),
    ],
)
def test_probe_command_has_settings_other_than_defaults(train, option):
    assert option in probe_of_example(train)


def test_other_options_replace_settings():
    assert "--precision bf16" in probe_of_example(precision="bf16")


def test_probe_command_without_profile_has_no_limits():
    assert "--memory" not in repeated_probe_command(example_profile().train, None)


def test_probe_command_quotes_paths():
    expected = (
        "autotune probe --model CONFIG.json --data DIR --out 'my profiles/p.toml'"
    )
    assert probe_command(example_profile(), "my profiles/p.toml") == expected


def test_probe_command_omits_a_foreign_models_name():
    model = example_profile().train.model.model_copy(update={"name": "x; reboot"})
    hostile = but(example_profile(), train={"model": model})
    assert "reboot" not in probe_command(hostile, "p.toml")
    assert "reboot" not in repeated_probe_command(hostile.train, hostile)


def test_hostile_path_stays_one_argument():
    path = "p; reboot.toml"
    assert path in shlex.split(probe_command(example_profile(), path))
    assert path in shlex.split(probe_of_example(out=path))
