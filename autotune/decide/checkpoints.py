"""What a run's checkpoints take on the disk, from how the trainer writes them. Pure."""

from autotune.core.plan import CheckpointPlan, Figure
from autotune.decide.figures import computed
from trainer.config import CheckpointSettings

BYTES_PER_PARAMETER = 12
"""The weight and both of AdamW's averages, in 32 bits whatever the precision of the products."""
EXPORTED_BYTES_PER_PARAMETER = 4
"""The model that a finished run leaves beside its checkpoints."""


def checkpoints_of(parameters: Figure, settings: CheckpointSettings, steps: float) -> CheckpointPlan:
    """Bytes of one checkpoint and of all that lie on the disk at once.

    Left out: headers, manifests and the optimizer's step counts, some KiB; the tokenizer; logs.

    Args:
        parameters: Of the model.
        settings: What is kept.
        steps: Of the run.
    """
    one = computed(
        parameters,
        BYTES_PER_PARAMETER,
        f"{BYTES_PER_PARAMETER} bytes for each parameter: weights and two averages of AdamW, 32 bits",
    )
    kept = settings.keep_last if settings.enabled else 0
    if settings.enabled and settings.keep_every_steps is not None:
        kept += int(steps // settings.keep_every_steps)
    # Before the oldest goes, the new one is written; and the newest good one stays however old it is.
    at_once = kept + 2 if settings.enabled else 0
    bytes_per_parameter = at_once * BYTES_PER_PARAMETER + EXPORTED_BYTES_PER_PARAMETER
    disk = computed(
        parameters,
        bytes_per_parameter,
        f"at most {at_once} checkpoints at once (keep_last = {settings.keep_last}) and the exported model",
    )
    return CheckpointPlan(one=one, kept=kept, disk=disk)
