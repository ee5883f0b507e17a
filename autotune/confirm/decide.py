"""Splits to confirm, the length of their steps, and the one to use. Pure."""

import math
from collections.abc import Mapping, Sequence

from autotune.base.defaults import CONFIRM_WINDOW_S, WINDOW_S
from autotune.base.estimates import TOO_NOISY, Estimate
from autotune.base.window_statistics import (
    estimate_windows,
    paired_ratio,
    predict_window,
    scaled_residuals,
)
from autotune.base.wording import format_bounds, format_number
from autotune.evidence.confirm import ConfirmEvidence
from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.micro_batch import KNEE_SHARE, PredictedStep

WINDOW_FACTOR = CONFIRM_WINDOW_S / WINDOW_S
"""Duration of a window, as a multiple of the windows of other phases. Windows of 10
seconds or more are not longer."""
MAX_RIVALS = 2
"""Most splits that are measured beside the chosen one."""
RIVAL_SHARE = 0.95
"""Least predicted throughput of a split that is measured too, as a share of that of the
fastest one. Predictions from single micro-batches of full sequences are off by a few
percent."""
MIN_MICRO_BATCHES = 4
"""Fewest micro-batches in a step of a window, if training has as many."""
LONGEST_STEP_S = 10.0
"""Duration up to which a step of a window has all micro-batches of a step of training,
in seconds."""
PRECISE_HALF_WIDTH = 0.025
"""Half-width of the promised interval, relative to the rate, at which no more windows
are measured."""


def confirm_window_s(window_s: float) -> float:
    """Return the duration of a window, in seconds.

    It is longer than in other phases, which compare windows of one round: its rate
    stands for that of a training, and the speed of a machine varies by the second.

    Args:
        window_s: Duration of a window of other phases, in seconds.
    """
    return max(window_s, min(CONFIRM_WINDOW_S, WINDOW_FACTOR * window_s))


def rivals(steps: Sequence[PredictedStep], chosen_size: int) -> list[int]:
    """Return the micro-batch sizes that may turn out faster than the chosen one.

    Args:
        steps: Predicted steps of measured splits.
        chosen_size: Micro-batch size of the chosen split.
    """
    shortest_time = min((step.relative_time for step in steps), default=math.nan)
    near = sorted(
        (
            step
            for step in steps
            if step.relative_time * RIVAL_SHARE <= shortest_time
            and step.split.micro_batch_size != chosen_size
        ),
        key=lambda step: step.relative_time,
    )
    sizes = dict.fromkeys(step.split.micro_batch_size for step in near)
    return list(sizes)[:MAX_RIVALS]


def micro_batches_of_window(
    accumulation_steps: int, micro_batch_size: int, curve: Sequence[CurvePoint]
) -> int:
    """Return how many micro-batches a step of a window has.

    They are all of a step of training, unless that takes long.

    Args:
        accumulation_steps: Micro-batches of each rank in a step of training.
        micro_batch_size: Sequences of each of them.
        curve: Measured throughput by micro-batch size.
    """
    step_s = [point.step_s for point in curve if point.size == micro_batch_size]
    most = MIN_MICRO_BATCHES
    if step_s:
        most = max(most, int(LONGEST_STEP_S / step_s[0]))
    return min(accumulation_steps, most)


def fastest_split(
    rates_by_size: Mapping[int, Sequence[float]], chosen_size: int
) -> int:
    """Return the micro-batch size to use after windows of several.

    It is the chosen one unless another is surely faster, and by more than its smaller
    micro-batch is worth.

    Args:
        rates_by_size: Tokens/s of every round, by micro-batch size.
        chosen_size: Size that was chosen before.
    """
    best_size = chosen_size
    best_ratio = 1.0
    for size, rates in rates_by_size.items():
        pairs = list(zip(rates, rates_by_size[chosen_size], strict=False))
        if size == chosen_size or not pairs:
            continue
        ratio = paired_ratio(pairs, candidates=max(1, len(rates_by_size) - 1))
        is_faster = ratio.low is not None and ratio.low > 1
        if is_faster and ratio.value * KNEE_SHARE > 1 and ratio.value > best_ratio:
            best_size, best_ratio = size, ratio.value
    return best_size


def promise(rates_by_size: Mapping[int, Sequence[float]], size: int) -> Estimate:
    """Return the rate to expect of one further process with a micro-batch size.

    Windows of all sizes show the spread between processes, as it is the same machine.
    """
    residuals = [
        residual
        for rates in rates_by_size.values()
        for residual in scaled_residuals([math.log(rate) for rate in rates])
    ]
    rates = rates_by_size[size]
    if len(rates) < 2:
        return estimate_windows(rates)
    return predict_window(rates, residuals=residuals)


def is_precise(estimate: Estimate) -> bool:
    """Return whether the bounds of a promised rate are narrow enough."""
    bounds = estimate.interval()
    if bounds.low is None or bounds.high is None:
        return False
    return (bounds.high - bounds.low) / 2 <= PRECISE_HALF_WIDTH * bounds.value


def confirmed_words(confirm: ConfirmEvidence) -> str:
    """Return what was promised and delivered, in a line."""
    promised = confirm.promised
    between = format_bounds(promised.low, promised.high, format_number)
    words = f"promised {format_number(promised.value)} {confirm.rate_unit}"
    words += f" ({between})" if between else f" ({TOO_NOISY})"
    if confirm.delivered is None:
        return f"{words}; not delivered: {confirm.not_delivered}"
    return f"{words} · delivered {format_number(confirm.delivered.tokens_per_s)}"


TRAINING_SHARE = 0.1
"""Share of the time budget for the training that ends the confirm phase."""
MAX_TRAINING_S = 60.0
"""Longest such training, in seconds."""


def training_s(budget_s: float, models: int) -> float:
    """Return the time of the training that ends a confirm phase.

    Args:
        budget_s: Time budget of the whole tuning.
        models: Models to tune, which share it.
    """
    return min(MAX_TRAINING_S, TRAINING_SHARE * budget_s / models)
