"""Comparison of a run's settings with those of the training that it continues.

Some settings must not change, others may change and are reported. The rest, such as the
micro-batch size or the number of workers, has no effect on results.
"""

from pathlib import Path
from typing import Any

from trainer.checkpoint.format import TrainingState
from trainer.config.resolve import ResolvedConfig
from trainer.formats.errors import BadConfig
from trainer.formats.run_record import RunHeader
from trainer.formats.train_config import flatten_settings

_FIXED_KEYS = (
    # The weights and their shapes.
    "model.config",
    "model.null_keys",
    # The sequences of a step, and their order: the position in the data counts them.
    "seq_length_tokens",
    "layout",
    "global_batch_size",
    "global_batch_tokens",
    "global_batch_samples",
    "seed",
)
"""Settings that must not change on resume, as weights or the position in the data would
be invalid."""
_REPORTED_KEYS = (
    # The optimizer.
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_share",
    "final_learning_rate_share",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "max_steps",
    # The model's task and its numbers.
    "masking_probability",
    "attention_dropout",
    "precision",
    "residual_dtype",
    "float8",
    "tf32",
    "max_epochs",
    "parallel.gradient_dtype",
)
"""Settings that may change on resume, as those of ``health`` may; a change is
reported."""
_MAX_MESSAGE_LENGTH = 200
"""Number of characters from which a message leaves out the values, as a model's
configuration is long."""


def check_fixed_settings(
    earlier: RunHeader | TrainingState, resolved: ResolvedConfig, origin: Path
) -> None:
    """Check that the dataset and the settings that must not change are the same.

    Args:
        earlier: Record of the training that is continued.
        resolved: Configuration with which training continues.
        origin: Run or checkpoint of ``earlier``, for messages.

    Raises:
        BadConfig: If a change makes the weights or positions invalid.
    """
    _check_dataset(resolved.config.data.dataset_hash, earlier.dataset_hash, origin)
    earlier_settings = flatten_settings(earlier.config)
    settings = _settings_of(resolved)
    for key in _FIXED_KEYS:
        value = settings.get(key)
        earlier_value = earlier_settings.get(key)
        if value == earlier_value:
            continue
        message = (
            f"train.{key} = {value!r} does not match {origin}, trained with"
            f" {earlier_value!r}"
        )
        if len(message) >= _MAX_MESSAGE_LENGTH:  # without the values
            message = f"train.{key} does not match {origin}"
        raise BadConfig(
            message,
            next_step=(
                "Resume with the same settings, or start from scratch: --resume"
                " never, with another --out"
            ),
        )


def _check_dataset(expected_hash: str | None, earlier_hash: str, origin: Path) -> None:
    """Check that training continues on the same dataset, if the profile names one."""
    if expected_hash is None or expected_hash == earlier_hash:
        return
    raise BadConfig(
        f"dataset does not match {origin}: its hash is {earlier_hash[:12]}…,"
        f" not {expected_hash[:12]}…",
        next_step=(
            "Resume with that run's profile, or start from scratch with another --out."
        ),
    )


def describe_changes(
    earlier: RunHeader | TrainingState, resolved: ResolvedConfig
) -> list[str]:
    """Return a sentence for every changed setting that is reported."""
    earlier_settings = flatten_settings(earlier.config)
    changes = []
    for key, value in _settings_of(resolved).items():
        is_reported = key in _REPORTED_KEYS or key.startswith("health.")
        earlier_value = earlier_settings.get(key)
        if is_reported and value != earlier_value:
            changes.append(f"train.{key} is now {value}, it was {earlier_value}")
    return changes


def _settings_of(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the values of all settings by dotted key, as a run record has them."""
    return flatten_settings(resolved.config.model_dump(mode="json"))
