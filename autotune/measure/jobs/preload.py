"""What is imported before a trial's process forks, or begins to count its memory."""

import importlib
import sys
from typing import Any

import torch
import transformers

_MODULES = ("trainer.loop", "autotune.measure.jobs.step", "autotune.measure.jobs.feed", "torch._dynamo")


def preload_trainer() -> None:
    """Import the trainer, the jobs that use it, and what torch would import in the first step."""
    for module in _MODULES:
        importlib.import_module(module)


def model_type_of(measured: dict[str, Any]) -> str | None:
    """The model type of what a trial measures, or None where it has no model."""
    model_type = measured.get("config", {}).get("model", {}).get("config", {}).get("model_type")
    return model_type if isinstance(model_type, str) else None


def preload_model(model_type: str | None) -> None:
    """Import a model type's code, by building its default shape without memory; of none, nothing."""
    if model_type is None:
        return
    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")
