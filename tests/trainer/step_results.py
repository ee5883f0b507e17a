"""Results of optimizer steps that were not computed."""

import torch

from trainer.distributed.step import StepResult
from trainer.runtime.device_events import DeviceEvent


def result_of(
    *,
    loss=2.0,
    norm=1.0,
    applied=True,
    sums=(),
    partial=None,
    computed_s=0.0,
    gradients_sent_s=None,
) -> StepResult:
    """Return the result of a step that began at 0 s on the clock of the device.

    Args:
        loss: Mean loss per predicted token.
        norm: Gradient norm before clipping.
        applied: Whether the update was applied.
        sums: Sums over all ranks of the values that were passed to the step.
        partial: Gradient of a part of the step; None if it was not measured.
        computed_s: Time at which the gradients were reduced and the weights updated.
        gradients_sent_s: Time at which the last gradients departed; None if unknown.
    """
    began = DeviceEvent(0.0)
    computed = DeviceEvent(computed_s)
    gradients_sent = None if gradients_sent_s is None else DeviceEvent(gradients_sent_s)
    return StepResult(
        loss=torch.tensor(loss, dtype=torch.float64),
        grad_norm=torch.tensor(norm, dtype=torch.float64),
        applied=torch.tensor(applied),
        sums=torch.tensor(sums, dtype=torch.float64),
        partial=partial,
        began=began,
        count_requested=began,
        count_received=began,
        gradients_sent=gradients_sent,
        reduced=computed,
        updated=computed,
    )
