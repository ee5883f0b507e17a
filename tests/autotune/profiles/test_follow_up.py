import shlex

import pytest

from autotune.profiles.decide.follow_up import command, probe_again, probe_command
from testbed.examples.profiles import but, example_profile


def probe_of_example(train=None, **options):
    """Return the probe command of the example with other settings.

    Args:
        train: Settings that replace the example's.
        options: Options of the command to add or replace.
    """
    profile = but(example_profile(), train=train or {})
    return probe_again(profile.train, profile, **options)


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
        ({"seq_length_tokens": 128}, "--seq-length 128"),
        ({"layout": "padded"}, "--layout padded"),
        ({"precision": "bf16"}, "--precision bf16"),
        ({"attention_dropout": 0.0}, "--attention-dropout 0.0"),
        ({"activation_checkpointing": "full"}, "--activation-checkpointing full"),
        ({"compile": True}, "--compile"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_probe_command_has_settings_other_than_defaults(train, option):
    assert option in probe_of_example(train)


def test_other_options_replace_settings():
    assert "--precision bf16" in probe_of_example(precision="bf16")


def test_probe_command_without_profile_has_no_limits():
    assert "--memory" not in probe_again(example_profile().train, None)


def test_probe_command_quotes_paths():
    expected = (
        "autotune probe --model CONFIG.json --data DIR --out 'my profiles/p.toml'"
    )
    assert probe_command(example_profile(), "my profiles/p.toml") == expected


def test_probe_command_omits_a_foreign_models_name():
    model = example_profile().train.model.model_copy(update={"name": "x; reboot"})
    train = {"model": model}
    path = "p; reboot.toml"
    hostile = but(example_profile(), train=train)
    for text in (probe_command(hostile, path), probe_of_example(train, out=path)):
        assert path in shlex.split(text)
        assert "x; reboot" not in text
