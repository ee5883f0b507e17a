"""Probe requests from the options of a command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.subjects.mlm.memory.probe import ProbeRequest
from autotune.subjects.mlm.memory.stage import requested_config
from trainer.formats.presets import model_settings

if TYPE_CHECKING:
    from autotune.console.options import ModelOptions


def probe_requests(
    options: "ModelOptions", reports: Path, settings: dict[str, object], **more: Any
) -> tuple[ProbeRequest, ...]:
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
        ProbeRequest(
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
