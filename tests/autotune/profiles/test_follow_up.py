import shlex

import pytest

from autotune.profiles.decide.follow_up import command, probe_again, probe_command
from testbed.examples.profiles import but, example_profile


def again(train=None, **others):
    profile = but(example_profile(), train=train or {})
    return probe_again(profile.train, profile, **others)


def test_options_at_their_defaults_are_left_out_flags_and_lists_are_spelled_and_a_probe_is_told_what_it_lacks():
    options = {
        "max_micro_batch_size": 16_384,
        "seq_length": 512,
        "memory": None,
        "accumulate": False,
    }
    assert (
        command("probe", model=["a", "b"], **options)
        == "autotune probe --model a --model b --no-accumulate"
    )
    assert (
        command("train", "my p.toml", slurm=True)
        == "autotune train 'my p.toml' --slurm"
    )
    assert (
        again({"layout": "packed"}, model="tiny.json", out="p.toml")
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
def test_what_a_profile_has_otherwise_is_probed_so(train, option):
    assert option in again(train)


def test_a_change_replaces_the_setting_and_paths_are_quoted_and_names_of_strangers_are_no_part_of_the_command():
    assert "--precision bf16" in again(precision="bf16")
    assert "--memory" not in probe_again(example_profile().train, None)
    expected = (
        "autotune probe --model CONFIG.json --data DIR --out 'my profiles/p.toml'"
    )
    assert probe_command(example_profile(), "my profiles/p.toml") == expected
    train = {
        "model": example_profile().train.model.model_copy(update={"name": "x; reboot"})
    }
    hostile, path = but(example_profile(), train=train), "p; reboot.toml"
    for said in (probe_command(hostile, path), again(train, out=path)):
        assert path in shlex.split(said)
        assert "x; reboot" not in said
