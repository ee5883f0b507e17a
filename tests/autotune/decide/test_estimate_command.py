from autotune.decide.estimate_command import estimate_command
from tests.autotune.profiles import estimated_profile


def command_of(profile):
    assert profile.evidence.estimate is not None
    return estimate_command(profile, profile.evidence.estimate, "p.toml", model="bert-120m")


def test_the_command_names_everything_that_the_prediction_rests_on():
    assert command_of(estimated_profile()) == (
        "autotune estimate --model bert-120m --gpu h100-nvl-94gb --vocab-size 30522 --seq-length 512 --layout packed "
        "--precision bf16 --attention auto --checkpointing none --head masked --ranks 2 --headroom 0.03 --out p.toml"
    )


def test_a_dataset_stands_in_place_of_what_is_assumed():
    said = command_of(estimated_profile(rows_assumed=False))
    assert "--data DIR" in said
    assert "--vocab-size" not in said
    assert "--global-batch-tokens 130679" in said


def test_less_memory_than_the_card_has_is_said():
    profile = estimated_profile(card=None, micro_batches_per_step=1)
    there = profile.fingerprint.model_copy(update={"gpu_name": None, "gpu_total_bytes": None})
    said = command_of(profile.model_copy(update={"fingerprint": there}))
    assert "--gpu" not in said
    assert "--memory 94720MiB" in said
    assert said.endswith("--no-accumulate")
