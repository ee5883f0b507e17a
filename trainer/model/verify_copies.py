"""Verification that an architecture can compute with working copies of its weights."""

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from trainer.model.probe import (
    NoSmallCopy,
    check_small_copy,
    is_close,
    logits_alone,
    probe_documents,
)
from trainer.model.working_copies import WorkingCopies


def verify_working_copies(config: PretrainedConfig) -> str | None:
    """Check that an architecture can compute with working copies of its weights.

    Returns:
        The reason why it cannot, or None if it can.
    """
    try:
        return check_small_copy(_check_working_copies, config)
    except NoSmallCopy as error:
        return str(error)


def _check_working_copies(model: PreTrainedModel) -> str | None:
    # In fp32, logits and gradients must be those without copies.
    in_fp32 = copy.deepcopy(model)
    WorkingCopies(in_fp32, dtype=torch.float32)
    in_bf16 = copy.deepcopy(model)
    WorkingCopies(in_bf16)
    for expected, actual in zip(
        _logits_and_gradient(model), _logits_and_gradient(in_fp32), strict=True
    ):
        if not is_close(actual, expected):
            return "its linear layers are called in another order, or with other inputs"
    # In bf16, the model must compute with copies under autocast without an error.
    with torch.autocast("cpu", torch.bfloat16):
        _logits_and_gradient(in_bf16)
    return None


def _logits_and_gradient(
    model: PreTrainedModel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a document, and the gradient of the sum of their squares.

    The gradient is with respect to all parameters, flattened.
    """
    logits = logits_alone(model, probe_documents(model.config).first)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(
        logits.float().square().sum(), trained, materialize_grads=True
    )
    return logits, torch.cat([gradient.flatten() for gradient in gradients])
