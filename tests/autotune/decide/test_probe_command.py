import shlex

import pytest

from autotune.core.defaults import HEADROOM_SHARE
from autotune.decide.probe_command import command, probe_again, probe_command
from tests.autotune.profiles import example_profile


def with_train(**train):
    profile = example_profile()
    return profile.model_copy(update={"train": profile.train.model_copy(update=train)})


def again(profile, **others):
    return probe_again(profile.train, profile, **others)


def test_options_at_their_defaults_are_left_out_and_flags_and_lists_are_spelled():
    assert command("probe", model=["a", "b"], max_rows=16_384, seq_length=512, memory=None, accumulate=False) == (
        "autotune probe --model a --model b --no-accumulate"
    )
    assert command("launch slurm", profile="my p.toml", slurm=True) == (
        "autotune launch slurm --profile 'my p.toml' --slurm"
    )


def test_a_tuned_profile_is_probed_again_by_its_name_and_place():
    assert probe_command(example_profile(), "my profiles/p.toml") == (
        "autotune probe --model CONFIG.json --data DIR --out 'my profiles/p.toml'"
    )


def test_the_same_probe_has_what_a_probe_would_not_take_by_itself():
    profile = with_train(layout="packed")
    assert profile.constraints.headroom_share == HEADROOM_SHARE
    assert again(profile, model="tiny.json", out="p.toml") == (
        "autotune probe --model tiny.json --data DIR --device cpu --memory 1GiB --global-batch-tokens 4096 "
        "--no-accumulate --ranks 1 --out p.toml"
    )


@pytest.mark.parametrize(
    ("train", "option"),
    [
        ({"seq_length_tokens": 128}, "--seq-length 128"),
        ({"layout": "padded"}, "--layout padded"),
        ({"precision": "bf16"}, "--precision bf16"),
        ({"attention_dropout": 0.0}, "--attention-dropout 0.0"),
        ({"checkpointing": "full"}, "--checkpointing full"),
        ({"compile_layers": True}, "--compile"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_what_a_profile_has_otherwise_is_probed_so(train, option):
    assert option in again(with_train(**train))


def test_a_change_replaces_the_setting_and_without_a_profile_its_budget_is_open():
    train = example_profile().train
    assert "--precision bf16" in again(example_profile(), precision="bf16")
    assert "--memory" not in probe_again(train, None)


def test_places_are_quoted_and_names_of_strangers_are_no_part_of_the_command():
    hostile = with_train(model=example_profile().train.model.model_copy(update={"name": "x; reboot"}))
    for said in (probe_command(hostile, "p; reboot.toml"), again(hostile, out="p; reboot.toml")):
        assert "p; reboot.toml" in shlex.split(said)
        assert "x; reboot" not in said
