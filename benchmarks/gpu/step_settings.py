"""Settings of a training step that are compared one at a time. No torch here.

To compare another setting, add a row. A row whose setting this version of the trainer
does not know, or whose module is not installed, is skipped and listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """One setting, and the step that it is compared with."""

    name: str
    """Name of the row."""
    changed: Mapping[str, Any]
    """Settings of the step; all others are as tuned by default."""
    compared_with: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the step before."""
    module: str | None = None
    """Module that must be installed."""


STEP_SETTINGS = (
    StepSetting(name="mix_order_reduction", changed={"mix_order_reduction": True}),
    StepSetting(name="no-combo_kernels", changed={"combo_kernels": False}),
    StepSetting(name="fused_norms", changed={"fused_norms": True}),
    StepSetting(name="gelu_epilogues", changed={"gelu_epilogues": True}),
    StepSetting(name="fa4", changed={"attention": "fa4"}, module="flash_attn.cute"),
    StepSetting(name="bf16-residual", changed={"residual_dtype": "bf16"}),
)
"""Rows of the comparison, the most valuable first."""


def step_config(
    model: str,
    micro_batch_size: int,
    settings: Mapping[str, Any],
    *,
    seq_length_tokens: int = 512,
    device: str = "cuda",
) -> TrainConfig:
    """Return the configuration of a step with one micro-batch.

    Raises:
        ValidationError: If a setting is not known, or its value is not valid.
    """
    return TrainConfig.model_validate(
        {
            "model": model_settings(model),
            "seq_length_tokens": seq_length_tokens,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": micro_batch_size,
            "layout": "packed",
            "precision": "bf16",
            "device": device,
            "compile": True,
            "attention_dropout": 0.0,
            **settings,
        }
    )


def reason_unavailable(row: StepSetting) -> str | None:
    """Return why this version of the trainer cannot take a row's step, or None."""
    for settings in (row.compared_with, row.changed):
        try:
            step_config("bert-mini", 1, settings)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            return f"train.{key}: {problem['msg']}"
    return None


def row_of(name: str) -> StepSetting:
    """Return the row with a name."""
    return next(row for row in STEP_SETTINGS if row.name == name)
