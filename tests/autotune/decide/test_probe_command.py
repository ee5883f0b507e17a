import shlex

import pytest

from autotune.decide.probe_command import probe_command, takes_the_whole_card
from tests.autotune.profiles import estimated_profile, example_profile


def with_train(**train):
    profile = estimated_profile()
    return profile.model_copy(update={"train": profile.train.model_copy(update=train)})


def with_budget(size_bytes):
    profile = estimated_profile()
    constraints = profile.constraints.model_copy(update={"memory_budget_bytes": size_bytes})
    return profile.model_copy(update={"constraints": constraints})


def test_a_tuned_profile_is_probed_again_by_its_name_and_place():
    assert probe_command(example_profile(), "my profiles/p.toml") == (
        "autotune probe --model CONFIG.json --data DIR --out 'my profiles/p.toml'"
    )
    assert "--model tiny.json" in probe_command(example_profile(), "p.toml", model="tiny.json")


def test_what_a_probe_takes_by_itself_is_left_out_and_the_ranks_are_not():
    assert probe_command(estimated_profile(), "p.toml", data="data") == (
        "autotune probe --model bert-120m --data data --out p.toml --ranks 2"
    )


@pytest.mark.parametrize(
    ("profile", "option"),
    [
        (with_train(seq_length_tokens=128), "--seq-length 128"),
        (with_train(layout="padded"), "--layout padded"),
        (with_train(precision="fp32"), "--precision fp32"),
        (with_train(attention_dropout=0.0), "--attention-dropout 0.0"),
        (with_train(checkpointing="full"), "--checkpointing full"),
        (with_train(global_batch_tokens=9000), "--global-batch-tokens 9000"),
        (with_train(device="cpu"), "--device cpu"),
        (with_budget(80 * 10**9), "--memory 80GB"),
        (estimated_profile(micro_batches_per_step=1), "--no-accumulate"),
        (estimated_profile(rows_assumed=False), "--global-batch-tokens 130679"),
    ],
)
def test_what_was_estimated_otherwise_is_probed_so(profile, option):
    assert option in probe_command(profile, "p.toml")


def test_places_are_quoted_and_names_of_strangers_are_no_part_of_the_command():
    hostile = with_train(model=estimated_profile().train.model.model_copy(update={"name": "x; reboot"}))
    command = probe_command(hostile, "p; reboot.toml")
    assert "p; reboot.toml" in shlex.split(command)
    assert "x; reboot" not in command


def test_a_budget_is_the_whole_card_only_where_it_is_what_a_process_sees_of_it():
    assert takes_the_whole_card(estimated_profile())
    assert not takes_the_whole_card(with_budget(94 * 10**9))
    assert not takes_the_whole_card(example_profile())
    unnamed = estimated_profile().fingerprint.model_copy(update={"gpu_name": None, "gpu_total_bytes": None})
    assert not takes_the_whole_card(estimated_profile().model_copy(update={"fingerprint": unnamed}))
