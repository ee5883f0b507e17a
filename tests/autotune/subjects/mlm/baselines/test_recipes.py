"""Untuned settings of the bundled trainer, and their differences from tuned ones."""

import dataclasses

import pytest
from transformers import TrainingArguments

from autotune.evidence.baseline import SettingDifference
from autotune.subjects.mlm.baselines.recipes import (
    PADDED_WORKERS,
    Recipe,
    differences,
    padded,
    untuned,
)
from trainer.formats.train_config import (
    DataSettings,
    ModelSettings,
    ParallelSettings,
    TrainConfig,
)

TUNED = TrainConfig(
    model=ModelSettings(name="m", config={"model_type": "bert"}),
    data=DataSettings(
        path="../data", dataset_hash="d", num_workers=3, prefetch_factor=4
    ),
    parallel=ParallelSettings(strategy="zero1", bucket_cap_mib=100, timeout_s=900.0),
    seq_length_tokens=128,
    layout="packed",
    micro_batch_size=64,
    global_batch_size=128,
    attention_dropout=0.0,
    compile=True,
    precision="bf16",
    device="cuda",
    seed=7,
    learning_rate=3e-4,
    masking_probability=0.3,
)
GLOBAL_BATCH_TOKENS = 4096


def untuned_recipe(tuned: TrainConfig = TUNED) -> Recipe:
    """Return the untuned settings."""
    return untuned(tuned, GLOBAL_BATCH_TOKENS)


def padded_recipe(tuned: TrainConfig = TUNED) -> Recipe:
    """Return the padded recipe on a machine that allows all of its workers."""
    return padded(
        tuned, GLOBAL_BATCH_TOKENS, max_workers=PADDED_WORKERS + 4, limit="12 CPUs"
    )


def with_model(model_type: str) -> TrainConfig:
    """Return the tuned settings of a model of this type."""
    model = ModelSettings(name="m", config={"model_type": model_type})
    return TUNED.model_copy(update={"model": model})


def differences_by_key(
    recipe: Recipe, tuned: TrainConfig = TUNED, local_ranks: int = 1
) -> dict[str, SettingDifference]:
    """Return the differences of a recipe from tuned settings, by the setting's key."""
    return {
        difference.key: difference
        for difference in differences(recipe, tuned, local_ranks)
    }


both_baselines = pytest.mark.parametrize(
    "config",
    [
        pytest.param(untuned_recipe().config, id="untuned"),
        pytest.param(padded_recipe().config, id="padded"),
    ],
)


@both_baselines
def test_baselines_keep_the_users_own_settings(config):
    kept = (
        "model",
        "seq_length_tokens",
        "device",
        "seed",
        "learning_rate",
        "masking_probability",
    )
    assert all(getattr(config, name) == getattr(TUNED, name) for name in kept)
    assert config.data.path == "../data"
    assert config.data.dataset_hash == "d"


@both_baselines
def test_baselines_have_a_global_batch_in_tokens(config):
    assert config.global_batch_tokens == GLOBAL_BATCH_TOKENS
    assert config.global_batch_samples is None


@both_baselines
def test_settings_of_baselines_are_valid(config):
    assert TrainConfig.model_validate(config.model_dump()) == config


@both_baselines
def test_baselines_have_plain_settings(config):
    plain = {
        "precision": "fp32",
        "tf32": False,
        "mlm_head": "dense",
        "last_layer": "dense",
        "attention": "auto",
        "compile": False,
        "activation_checkpointing": "none",
    }
    assert {name: getattr(config, name) for name in plain} == plain
    assert config.parallel == ParallelSettings(
        gradient_as_bucket_view=False, timeout_s=TUNED.parallel.timeout_s
    )


@pytest.fixture(scope="module")
def default_arguments() -> dict:
    """Return the defaults of transformers' Trainer, by name."""
    return {
        field.name: field.default for field in dataclasses.fields(TrainingArguments)
    }


def test_untuned_settings_are_transformers_defaults(default_arguments):
    config = untuned_recipe().config
    assert config.micro_batch_size == default_arguments["per_device_train_batch_size"]
    assert config.data.num_workers == default_arguments["dataloader_num_workers"]
    assert config.data.pin_memory == default_arguments["dataloader_pin_memory"]
    assert config.layout == "dynamic"
    assert config.attention_dropout is None


def test_transformers_defaults_are_plain(default_arguments):
    # Settings that the recipe takes for granted.
    faster = ("bf16", "fp16", "tf32", "torch_compile", "gradient_checkpointing")
    assert not any(default_arguments[name] for name in faster)
    assert default_arguments["ddp_bucket_cap_mb"] is None
    assert default_arguments["train_sampling_strategy"] == "random"


def test_padded_recipe_pads_to_full_length():
    config = padded_recipe().config
    assert config.layout == "padded"
    assert config.micro_batch_size == TUNED.micro_batch_size
    assert config.data.num_workers == PADDED_WORKERS


@pytest.mark.parametrize(
    ("model_type", "dropout"),
    [
        pytest.param("bert", 0.0, id="bert"),
        pytest.param("modernbert", 0.0, id="modernbert"),
        pytest.param("deberta", None, id="deberta, which has no such setting"),
    ],
)
def test_padded_recipe_has_no_attention_dropout(model_type, dropout):
    assert padded_recipe(with_model(model_type)).config.attention_dropout == dropout


@pytest.mark.parametrize(
    ("key", "theirs", "tuned"),
    [
        ("precision", "fp32", "bf16"),
        ("compile", False, True),
        ("attention_dropout", None, 0.0),
        ("data.num_workers", 0, 3),
        ("parallel.strategy", "ddp", "zero1"),
    ],
)
def test_differences_name_both_values(key, theirs, tuned):
    difference = differences_by_key(untuned_recipe(), local_ranks=2)[key]
    assert difference == SettingDifference(key=key, theirs=theirs, tuned=tuned)


def test_differences_are_of_settings_of_speed():
    keys = differences_by_key(untuned_recipe(), local_ranks=2)
    assert not any("global_batch" in key or "timeout" in key for key in keys)


def test_recipe_does_not_differ_from_itself():
    plain = untuned_recipe().config
    assert differences(untuned_recipe(plain), plain, local_ranks=2) == []


def test_one_rank_has_no_differences_of_synchronisation():
    keys = differences_by_key(padded_recipe(), local_ranks=1)
    assert "compile" in keys
    assert not any(key.startswith("parallel.") for key in keys)


def test_cpu_has_no_difference_of_tf32():
    on_cpu = TUNED.model_copy(update={"device": "cpu", "precision": "fp32"})
    keys = differences_by_key(padded_recipe(on_cpu), on_cpu)
    assert "compile" in keys
    assert "tf32" not in keys
    assert "precision" not in keys  # equal in both


def test_free_choices_need_no_reason():
    reasons = [
        difference.reason for difference in differences_by_key(padded_recipe()).values()
    ]
    assert set(reasons) == {None}


def test_explains_fewer_workers():
    recipe = padded(TUNED, GLOBAL_BATCH_TOKENS, max_workers=3, limit="3 CPUs")
    # Equal to the tuned value, which also is 3.
    assert differences_by_key(recipe)["data.num_workers"] == SettingDifference(
        key="data.num_workers",
        theirs=3,
        tuned=3,
        reason="8 exceed the limit of this machine: 3 CPUs",
    )


def test_explains_a_smaller_micro_batch():
    recipe = padded_recipe()
    smaller = dataclasses.replace(
        recipe,
        config=recipe.config.model_copy(update={"micro_batch_size": 32}),
        because={"micro_batch_size": "64 do not fit"},
    )
    assert differences_by_key(smaller)["micro_batch_size"] == SettingDifference(
        key="micro_batch_size", theirs=32, tuned=64, reason="64 do not fit"
    )


def test_explains_attention_dropout_of_deberta():
    deberta = with_model("deberta")
    difference = differences_by_key(padded_recipe(deberta), deberta)[
        "attention_dropout"
    ]
    assert "this setting of deberta" in difference.reason
