"""Recipes of both baselines, and their differences from the tuned settings."""

import dataclasses

import pytest
from transformers import TrainingArguments

from autotune.base.interval import Interval
from autotune.baseline.decide.recipes import differences, hf_trainer, is_precise, paper
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


def theirs(tuned: TrainConfig = TUNED) -> TrainConfig:
    return hf_trainer(tuned, 4096).config


def papers(tuned: TrainConfig = TUNED, workers: int = 12) -> TrainConfig:
    return paper(tuned, 4096, workers, "limit").config


def differing(recipe, tuned=TUNED, local_ranks=1):
    return {
        difference.key: (difference.theirs, difference.tuned, difference.reason)
        for difference in differences(recipe, tuned, local_ranks)
    }


both_baselines = pytest.mark.parametrize(
    "config", [theirs(), papers()], ids=["Hugging Face", "paper"]
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
    assert (config.data.path, config.data.dataset_hash) == ("../data", "d")
    assert (config.global_batch_tokens, config.global_batch_samples) == (4096, None)


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
    config = theirs()
    arguments = {
        field.name: field.default for field in dataclasses.fields(TrainingArguments)
    }
    assert (config.layout, config.attention_dropout) == ("dynamic", None)
    assert config.micro_batch_size == arguments["per_device_train_batch_size"]
    assert config.data.num_workers == arguments["dataloader_num_workers"]
    assert config.data.pin_memory == arguments["dataloader_pin_memory"]
    assert not any(
        arguments[name]
        for name in ("bf16", "fp16", "tf32", "torch_compile", "gradient_checkpointing")
    )
    assert (arguments["ddp_bucket_cap_mb"], arguments["train_sampling_strategy"]) == (
        None,
        "random",
    )


@pytest.mark.parametrize(
    ("model_type", "dropout"), [("bert", 0.0), ("modernbert", 0.0), ("deberta", None)]
)
def test_paper_baseline_pads_to_full_length(model_type, dropout):
    model = ModelSettings(name="m", config={"model_type": model_type})
    config = papers(TUNED.model_copy(update={"model": model}))
    assert (config.layout, config.attention_dropout) == ("padded", dropout)
    assert (config.micro_batch_size, config.data.num_workers) == (64, 8)


def test_differences_name_both_values():
    differing_settings = differing(hf_trainer(TUNED, 4096), local_ranks=2)
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
    assert differing(hf_trainer(theirs(), 4096), theirs(), local_ranks=2) == {}


def test_settings_without_effect_are_no_differences():
    on_cpu = TUNED.model_copy(update={"device": "cpu", "precision": "fp32"})
    alone = differing(paper(on_cpu, 4096, 8, "limit"), on_cpu)
    assert not any(key.startswith(("parallel.", "tf32", "precision")) for key in alone)


def test_free_choices_need_no_reason():
    for _, _, reason in differing(paper(TUNED, 1, 8, "8 CPUs")).values():
        assert reason is None


def test_explains_fewer_workers_than_the_paper():
    recipe = paper(TUNED, 1, 3, "3 CPUs")
    smaller = recipe.config.model_copy(update={"micro_batch_size": 32})
    because = {**recipe.because, "micro_batch_size": "64 do not fit"}
    differing_settings = differing(
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
    differing_settings = differing(paper(deberta, 1, 8, "8 CPUs"), deberta)
    _, _, reason = differing_settings["attention_dropout"]
    assert "this setting of deberta" in reason


@pytest.mark.parametrize(
    ("low", "high", "precise"),
    [(0.96, 1.04, True), (0.9, 1.1, False), (None, None, False), (0.93, 1.02, True)],
)
def test_ratio_within_five_per_cent_is_precise(low, high, precise):
    assert is_precise(Interval(value=1.0, low=low, high=high)) is precise
