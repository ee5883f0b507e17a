"""Probe requests from the options of a command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.subjects.mlm.memory.probe import MlmProbeRequest
from trainer.formats.presets import model_settings
from trainer.formats.tables import parse_table
from trainer.formats.train_config import ModelSettings, TrainConfig

if TYPE_CHECKING:
    from autotune.console.options import ModelOptions


def probe_requests(
    options: "ModelOptions", reports: Path, settings: dict[str, object], **more: Any
) -> tuple[MlmProbeRequest, ...]:
    """Return a probe request for each model.

    Args:
        options: Models, dataset and limits.
        reports: Directory of reports, which has the trial logs.
        settings: Further settings of the step, by name.
        more: Further fields of the requests.

    Raises:
        BadConfig: If a model is not found, or a setting is invalid.
    """
    tokens = options.global_batch_tokens and int(options.global_batch_tokens)
    step_settings = settings | {
        "attention_dropout": options.attention_dropout,
        "precision": options.precision,
        "seq_length_tokens": options.seq_length,
        "global_batch_tokens": tokens,
    }
    return tuple(
        MlmProbeRequest(
            config=requested_config(model_settings(name), **step_settings),
            data=options.data,
            reports=reports,
            memory_bytes=options.memory_bytes,
            ranks=options.ranks,
            max_size=options.max_micro_batch_size,
            trial_timeout_s=options.trial_timeout_s,
            **more,
        )
        for name in options.model
    )


def requested_config(model: ModelSettings, **settings: Any) -> TrainConfig:
    """Return settings of a step, of which only the requested ones count as set.

    Args:
        model: The model.
        settings: Settings by name; None is replaced by the site's default later.

    Raises:
        BadConfig: If a setting is unknown or invalid.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return parse_table(TrainConfig, {"model": model, **given}, where="the options")
