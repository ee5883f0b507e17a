"""The size of a model and the tokens that give the lowest loss for an amount of compute, after Hoffmann et al. Pure.

Training takes about C = 6·N·D operations for N parameters and D tokens (Kaplan et al. 2020). Of the three ways in which
Hoffmann et al. 2022 (arXiv 2203.15556) fitted more than 400 runs, the first finds that N and D should both grow with
the square root of C; their model of 70 B parameters on 1.4 T tokens has D = 20·N. Together: N = √(C/120), D = 20·N.
The other two ways find N to grow with C to the 0.49 and the 0.46. ``docs/plan.md`` says for which models it was fitted.
"""

import math
from dataclasses import dataclass

FLOPS_PER_PARAMETER_AND_TOKEN = 6
TOKENS_PER_PARAMETER = 20
FAR_RATIO = 4.0
"""Tokens per parameter so many times above or below are far: there even the exponents of the three ways part."""

FITTED_PARAMETERS = (70e6, 16e9)
AUTHORS = "Hoffmann et al. 2022"
SOURCE = f"{AUTHORS}, arXiv 2203.15556: C = 6·N·D, D = 20·N"
LIMITS = "fitted on decoder models, under one pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal:
    """The size of a model and the tokens that go with an amount of compute."""

    parameters: float
    tokens: float


def optimal_for(flops: float) -> Optimal:
    """Return the model and the tokens for so many operations.

    Raises:
        ValueError: If that is not positive.
    """
    if not flops > 0:
        raise ValueError(f"{flops} operations train nothing")
    parameters = math.sqrt(flops / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return Optimal(parameters=parameters, tokens=TOKENS_PER_PARAMETER * parameters)


def off_optimum(parameters: float, tokens: float) -> float:
    """Return tokens per parameter over those that are compute-optimal: more than 1 is trained longer than that."""
    return tokens / parameters / TOKENS_PER_PARAMETER


def was_fitted(optimal: Optimal) -> bool:
    """Return whether models of that size were among those that were fitted."""
    least, most = FITTED_PARAMETERS
    return least <= optimal.parameters <= most


def is_far(ratio: float) -> bool:
    """Return whether a plan is worth a word."""
    return not 1 / FAR_RATIO <= ratio <= FAR_RATIO
