"""Resumes with settings that must not change, and with those that may."""

import pytest

from tests.trainer.checkpoint.starts import CONFIG, choose, messages_of
from tests.trainer.tiny_models import SHAPES, config_of
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import (
    CheckpointSettings,
    DataSettings,
    HealthSettings,
    ModelSettings,
)

pytestmark = pytest.mark.usefixtures("directory_without_runs")

RELU_MODEL = ModelSettings(name="m", config=SHAPES["bert"] | {"hidden_act": "relu"})
MODEL_WITHOUT_A_KEY = ModelSettings(
    name="m", config=SHAPES["bert"], null_keys=["classifier_dropout"]
)
OTHER_DATASET = DataSettings(dataset_hash="e" * 64)
OTHER_RECIPE = {
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 3,
    "decay_share": 0.2,
    "final_learning_rate_share": 0.1,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 1.0,
    "max_steps": 30,
    "masking_probability": 0.3,
    "attention_dropout": 0.1,
    "precision": "bf16",
    "residual_dtype": "bf16",
    "float8": "rowwise",
    "tf32": False,
    "max_epochs": 3,
}
"""Settings that may change; every value differs from that of ``CONFIG``."""


def resume_by_out(run, config):
    """Resume a run as ``--out RUN`` does."""
    return choose(run, config=config)


def resume_by_path(run, config):
    """Resume a run as ``--resume RUN`` does."""
    return choose(None, run, config=config)


def start_another_run(run, config):
    """Start a run from another one, as ``--resume RUN --out OTHER`` does."""
    return choose(run.parent / "other", run, config=config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        pytest.param("model", RELU_MODEL, r"train\.model\.config ", id="model.config"),
        pytest.param(
            "model",
            MODEL_WITHOUT_A_KEY,
            r"train\.model\.null_keys ",
            id="model.null_keys",
        ),
        ("seq_length_tokens", 32, r"train\.seq_length_tokens "),
        ("layout", "padded", r"train\.layout "),
        ("global_batch_size", 16, r"train\.global_batch_size "),
        ("global_batch_tokens", 512, r"train\.global_batch_tokens "),
        ("global_batch_samples", 8, r"train\.global_batch_samples "),
        ("seed", 1, r"train\.seed "),
        pytest.param(
            "data", OTHER_DATASET, "hash is d…, not eeeeeeeeeeee", id="dataset"
        ),
    ],
)
@pytest.mark.parametrize(
    "start_with",
    [
        pytest.param(resume_by_out, id="run as --out"),
        pytest.param(resume_by_path, id="run as --resume"),
        pytest.param(start_another_run, id="another run"),
    ],
)
def test_settings_of_weights_or_position_cannot_change(
    run, key, value, message, start_with
):
    files = sorted(run.rglob("*"))
    with pytest.raises(BadConfig, match=message) as raised:
        start_with(run, config_of(max_steps=20, **{key: value}))
    assert "start from scratch" in raised.value.next_step
    assert sorted(run.rglob("*")) == files
    assert not (run.parent / "other").exists()


def test_changes_of_the_recipe_are_reported(run):
    changed = config_of(**OTHER_RECIPE, health=HealthSettings(on_spike="rollback"))
    _, start = choose(run, config=changed)
    (event,) = start.events
    assert event.level == "warning"
    old_settings = CONFIG.model_dump()
    settings = changed.model_dump()
    for key in OTHER_RECIPE:
        change = f"train.{key} is now {settings[key]}, it was {old_settings[key]}"
        assert change in event.message
    assert "train.health.on_spike is now rollback, it was warn" in event.message


def test_changes_without_effect_on_results_are_not_reported(run):
    changed = config_of(
        max_steps=20,
        micro_batch_size=2,
        log_interval_steps=5,
        checkpoint=CheckpointSettings(interval_steps=3),
        data=DataSettings(num_workers=2),
    )
    _, start = choose(run, config=changed)
    assert messages_of(start) == ["resumed from step-000000010"]
