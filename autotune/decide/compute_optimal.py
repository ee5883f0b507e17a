"""The size of a model and the tokens that give the lowest loss for an amount of compute, after Hoffmann et al. Pure.

Training takes about C = 6·N·D operations for N parameters and D tokens (Kaplan et al. 2020). Of the three ways in which
Hoffmann et al. 2022 (arXiv 2203.15556) fitted more than 400 runs, the first finds that N and D should both grow with
the square root of C; their model of 70 B parameters on 1.4 T tokens has D = 20·N. Together: N = √(C/120), D = 20·N.
The other two ways find N to grow with C to the 0.49 and the 0.46.
"""

import math

from autotune.core.plan import Optimal

FLOPS_PER_PARAMETER_AND_TOKEN = 6
TOKENS_PER_PARAMETER = 20
FAR_RATIO = 4.0
"""Tokens per parameter so many times above or below are far: there even the exponents of the three ways part."""

FITTED_PARAMETERS = (70e6, 16e9)
AUTHORS = "Hoffmann et al. 2022"
SOURCE = f"{AUTHORS}, arXiv 2203.15556: C = 6·N·D, D = 20·N"
SHORT_LIMITS = "fitted on decoder models, under one pass; a masked LM predicts 15 % of its tokens, in many passes"
LIMITS = (
    "fitted on decoder models that predict every token of English text, 70 M to 16 B parameters, less than one pass",
    "a masked LM predicts 15 % of its tokens, sees most data often, and has shown other exponents: on proteins "
    "N ~ C^0.27, D ~ C^0.71 (Serrano et al. 2024, arXiv 2406.07249)",
    "what the model costs in use is left out: encoders are commonly trained far longer, as ModernBERT-base, 149 M, "
    "on 1.7 T tokens (Warner et al. 2024, arXiv 2412.13663)",
)


def optimal_for(flops: float) -> Optimal:
    """The model and the tokens for so many operations.

    Raises:
        ValueError: If that is not positive.
    """
    if not flops > 0:
        raise ValueError(f"{flops} operations train nothing")
    parameters = math.sqrt(flops / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return Optimal(parameters=parameters, tokens=TOKENS_PER_PARAMETER * parameters)


def flops_of(parameters: float, tokens: float) -> float:
    """C = 6·N·D, all parameters counted."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens


def tokens_of(flops: float, parameters: float) -> float:
    """The tokens on which a model spends so many operations."""
    return flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)


def off_optimum(parameters: float, tokens: float) -> float:
    """Tokens per parameter over those that are compute-optimal: 1 is optimal, more is trained longer than that."""
    return tokens / parameters / TOKENS_PER_PARAMETER


def was_fitted(optimal: Optimal) -> bool:
    """Whether models of that size were among those that were fitted."""
    least, most = FITTED_PARAMETERS
    return least <= optimal.parameters <= most


def is_far(ratio: float) -> bool:
    """Whether a plan is worth a word."""
    return not 1 / FAR_RATIO <= ratio <= FAR_RATIO
