"""The ``rates`` job: constants of this machine, for predictions of the trainer's step.

Shapes: M tokens, H heads, E dimensions of a head.
"""

from typing import Any

import torch

from autotune.speed.jobs import measure_rates
from autotune.speed.values import RatesRequest
from trainer.model.varlen import attend_documents


def run(measured: dict[str, Any], _local: dict[str, Any]) -> dict[str, Any]:
    """Measure the rates of torch's operators and of the trainer's attention.

    Args:
        measured: A ``RatesRequest``.

    Returns:
        The result of ``measure_rates.measure``.
    """
    return measure_rates.measure(RatesRequest.of(measured).device, _attend_within)


def _attend_within(
    query_MHE: torch.Tensor,
    key_MHE: torch.Tensor,
    value_MHE: torch.Tensor,
    edges: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Return the attention within documents, as the trainer computes it."""
    return attend_documents(
        [tensor.unsqueeze(1) for tensor in (query_MHE, key_MHE, value_MHE)],
        query_edges=edges,
        key_edges=edges,
        max_query_length=longest,
        max_key_length=longest,
    )
