"""Recipes of both baselines, and their differences from the tuned settings."""

import dataclasses

import pytest
from transformers import TrainingArguments

from autotune.base.interval import Interval
from autotune.baseline.decide.recipes import (
    PAPER_WORKERS,
    differences,
    hf_trainer,
    is_precise,
    paper,
)
from trainer.config.train_config import (
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
AMPLE_WORKERS = 12
"""Limit on DataLoader workers that does not affect the paper's."""


def transformers_config(tuned: TrainConfig = TUNED) -> TrainConfig:
    return hf_trainer(tuned, GLOBAL_BATCH_TOKENS).config


def paper_config(tuned: TrainConfig = TUNED) -> TrainConfig:
    return paper(tuned, GLOBAL_BATCH_TOKENS, AMPLE_WORKERS, "limit").config


def differences_by_key(recipe, tuned=TUNED, local_ranks=1):
    """Return the recipe's value, the tuned one and the reason, by the setting's key."""
    return {
        difference.key: (difference.theirs, difference.tuned, difference.reason)
        for difference in differences(recipe, tuned, local_ranks)
    }


both_baselines = pytest.mark.parametrize(
    "config", [transformers_config(), paper_config()], ids=["transformers", "paper"]
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
    assert config.global_batch_tokens == GLOBAL_BATCH_TOKENS
    assert config.global_batch_samples is None


@both_baselines
def test_baselines_have_plain_settings_that_are_valid(config):
    assert TrainConfig.model_validate(config.model_dump()) == config
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
        gradient_as_bucket_view=False, timeout_s=900.0
    )


def test_transformers_baseline_has_its_default_arguments():
    config = transformers_config()
    arguments = {
        field.name: field.default for field in dataclasses.fields(TrainingArguments)
    }
    assert config.layout == "dynamic"
    assert config.attention_dropout is None
    assert config.micro_batch_size == arguments["per_device_train_batch_size"]
    assert config.data.num_workers == arguments["dataloader_num_workers"]
    assert config.data.pin_memory == arguments["dataloader_pin_memory"]
    assert not any(
        arguments[name]
        for name in ("bf16", "fp16", "tf32", "torch_compile", "gradient_checkpointing")
    )
    assert arguments["ddp_bucket_cap_mb"] is None
    assert arguments["train_sampling_strategy"] == "random"


@pytest.mark.parametrize(
    ("model_type", "dropout"),
    [
        pytest.param("bert", 0.0, id="bert"),
        pytest.param("modernbert", 0.0, id="modernbert"),
        pytest.param("deberta", None, id="deberta, which has no such setting"),
    ],
)
def test_paper_baseline_pads_to_full_length(model_type, dropout):
    model = ModelSettings(name="m", config={"model_type": model_type})
    config = paper_config(TUNED.model_copy(update={"model": model}))
    assert config.layout == "padded"
    assert config.attention_dropout == dropout
    assert config.micro_batch_size == TUNED.micro_batch_size
    assert config.data.num_workers == PAPER_WORKERS


def test_differences_name_both_values():
    differing_settings = differences_by_key(
        hf_trainer(TUNED, GLOBAL_BATCH_TOKENS), local_ranks=2
    )
    expected = {
        "precision": ("fp32", "bf16", None),
        "compile": (False, True, None),
        "attention_dropout": (None, 0.0, None),
        "data.num_workers": (0, 3, None),
        "parallel.strategy": ("ddp", "zero1", None),
    }
    assert {key: differing_settings[key] for key in expected} == expected
    assert not any(
        "global_batch" in key or "timeout" in key for key in differing_settings
    )


def test_recipe_does_not_differ_from_itself():
    assert (
        differences_by_key(
            hf_trainer(transformers_config(), GLOBAL_BATCH_TOKENS),
            transformers_config(),
            local_ranks=2,
        )
        == {}
    )


def test_settings_without_effect_are_no_differences():
    on_cpu = TUNED.model_copy(update={"device": "cpu", "precision": "fp32"})
    alone = differences_by_key(
        paper(on_cpu, GLOBAL_BATCH_TOKENS, AMPLE_WORKERS, "limit"), on_cpu
    )
    assert not any(key.startswith(("parallel.", "tf32", "precision")) for key in alone)


def test_free_choices_need_no_reason():
    for _, _, reason in differences_by_key(
        paper(TUNED, GLOBAL_BATCH_TOKENS, AMPLE_WORKERS, "limit")
    ).values():
        assert reason is None


def test_explains_fewer_workers_than_the_paper():
    recipe = paper(TUNED, GLOBAL_BATCH_TOKENS, 3, "3 CPUs")
    smaller = recipe.config.model_copy(update={"micro_batch_size": 32})
    because = {**recipe.because, "micro_batch_size": "64 do not fit"}
    differing_settings = differences_by_key(
        dataclasses.replace(recipe, config=smaller, because=because)
    )
    assert differing_settings["data.num_workers"] == (
        3,
        3,
        "the paper's 8 exceed the limit of this machine: 3 CPUs",
    )
    assert differing_settings["micro_batch_size"] == (32, 64, "64 do not fit")


def test_explains_attention_dropout_of_deberta():
    model = ModelSettings(name="m", config={"model_type": "deberta"})
    deberta = TUNED.model_copy(update={"model": model})
    differing_settings = differences_by_key(
        paper(deberta, GLOBAL_BATCH_TOKENS, AMPLE_WORKERS, "limit"), deberta
    )
    _, _, reason = differing_settings["attention_dropout"]
    assert "this setting of deberta" in reason


@pytest.mark.parametrize(
    ("low", "high", "precise"),
    [
        pytest.param(0.96, 1.04, True, id="within 4 %"),
        pytest.param(0.93, 1.02, True, id="within 4.5 %, not symmetric"),
        pytest.param(0.9, 1.1, False, id="within 10 %"),
        pytest.param(None, None, False, id="no bounds"),
    ],
)
def test_ratio_within_five_per_cent_is_precise(low, high, precise):
    assert is_precise(Interval(value=1.0, low=low, high=high)) is precise
