"""What a rank computes in a step, from steps of all ranks in which no gradient travelled."""

import statistics
from collections.abc import Sequence

from autotune.core.network import GradientPart, RankCompute
from autotune.core.trial import ExchangeFigures
from autotune.decide.network import expected_largest

LEAST_PART_ELEMENTS = 2**17
"""Smaller gradients are kept together with the next: finer than DDP's smallest bucket, of 2¹⁸ in fp32."""


def compute_of(whole: ExchangeFigures, fixed_s: float) -> RankCompute:
    """What a rank computes, from steps of one micro-batch in which nothing travels."""
    ranks = len(whole.compute_s_by_rank)
    # How much a rank's own steps differ; a rank that is always slower is named elsewhere, and no matter of chance.
    deviations = [statistics.pstdev(steps) / statistics.fmean(steps) for steps in whole.compute_s_by_rank]
    jitter_share = statistics.median(deviations) if ranks > 1 else 0.0
    # The measured steps wait for the slowest of these ranks already.
    alone = 1 / (1 + jitter_share * expected_largest(ranks)) if ranks else 1.0
    return RankCompute(
        row_s=alone * (computed_s(whole) - fixed_s) / whole.rows,
        micro_batch_s=alone * fixed_s,
        update_s=whole.update_s,
        gradients=merged(whole.gradients),
        forward_share=whole.forward_share or 1 / 3,
        jitter_share=jitter_share,
    )


def merged(gradients: Sequence[tuple[int, float]]) -> tuple[GradientPart, ...]:
    """Small gradients together with the next, so that a profile can hold them."""
    found: list[GradientPart] = []
    elements = 0
    for number, (count, ready) in enumerate(gradients):
        elements += count
        if elements >= LEAST_PART_ELEMENTS or number == len(gradients) - 1:
            found.append(GradientPart(elements=elements, ready_share=ready))
            elements = 0
    return tuple(found)


def computed_s(figures: ExchangeFigures) -> float:
    """Forward and backward of a step in which nothing travels, waiting for the slowest rank included."""
    return max(1e-9, statistics.median(figures.step_s) - figures.update_s)
