"""Judgement of trials of a step: a leak, a size that is ignored, or memory that varies.

Everything here is pure.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

from autotune.memory.decide.batch_search import Prediction
from autotune.trials.job_figures import StepFigures

STEPS = 3
"""Optimizer steps of a trial of your code: the first allocates the optimizer's state,
two further ones must agree."""
LEAST_BYTES = 2 * 2**20
"""Least difference of memory that is no noise: allocators and Python keep a little
more, or less, from step to step."""
LEAST_SHARE = 0.005
"""The same, as a share of the peak."""
LONG_STEPS = 10
"""Steps of the trial that confirms a doubt of a shorter one."""
HIGHEST_SHARE = 0.4
"""Share of a trial's steps that reach its highest memory: then others may need less, as
an epoch's last batch does."""
FIRST_MARGIN = 1.25
"""Factor on the growth that a single trial shows."""
FLATTER = 16
"""Most by which a trial flattens the predicted growth."""
IGNORED_RATIO = 256
"""Ratio of two sizes whose peaks differ by less than ``LEAST_BYTES``, from which the
size seems to be ignored."""

Doubt = Literal["leaks", "varies"]


def doubt_of(figures: StepFigures) -> tuple[Doubt, int] | None:
    """Return the reason to doubt that every further step needs the same memory.

    The first step is left out: it allocates the optimizer's state.

    Returns:
        The reason with its bytes, or None without any.
    """
    noise = max(LEAST_BYTES, LEAST_SHARE * figures.peak_bytes)
    kept = figures.kept_bytes[1:]
    growth = [later - earlier for earlier, later in itertools.pairwise(kept)]
    if (
        growth
        and sum(growth) > noise * len(growth)
        and sum(one > noise / 2 for one in growth) > 0.7 * len(growth)
    ):
        return "leaks", sum(growth) // len(growth)
    peaks = list(figures.step_peak_bytes[1:])
    if not peaks or (spread := max(peaks) - min(peaks)) <= 2 * noise:
        return None
    highest = sum(max(peaks) - one <= 2 * noise for one in peaks)
    # Beyond what the next trial sees.
    rises = max(peaks) - max(peaks[: STEPS - 1]) > 2 * noise
    return (
        ("varies", spread)
        if rises or highest < max(2, HIGHEST_SHARE * len(peaks))
        else None
    )


def first_prediction(size: int, figures: StepFigures) -> Prediction | None:
    """Predict memory from one trial.

    All that is not kept between steps is assumed to grow with the size. Gradients,
    which are released and made again, and blocks of fixed size count as growing, and a
    margin is added. So the predicted size tends to fit, and shows the slope.

    Returns:
        The prediction, or None if nothing grows.
    """
    peaks, kept = figures.step_peak_bytes, figures.kept_bytes
    if not kept:
        return None
    peak_bytes = (
        figures.peak_bytes
        if figures.non_pytorch_bytes is None
        else max(peaks[1:] or peaks)
    )
    growing_bytes = peak_bytes - kept[-1] + figures.gradient_bytes
    if growing_bytes <= 0:
        return None
    base_bytes, each_bytes = (
        figures.peak_bytes - growing_bytes,
        FIRST_MARGIN * growing_bytes / size,
    )
    return Prediction(peak_bytes=lambda rows: base_bytes + each_bytes * rows)


def next_prediction(fits: Sequence[tuple[int, int]], before: Prediction) -> Prediction:
    """Predict memory from the two largest sizes that fitted.

    Noise may hide the growth between two sizes: at least a ``FLATTER``-th of the
    predicted growth is assumed.

    Args:
        fits: Sizes that fitted, with their peaks.
        before: Prediction before the last trial.
    """
    if len(fits) < 2:
        return before
    (smaller, lower_bytes), (size, peak_bytes) = fits[-2:]
    predicted_bytes = before.peak_bytes(size) - before.peak_bytes(smaller)
    each_bytes = max(peak_bytes - lower_bytes, predicted_bytes / FLATTER) / (
        size - smaller
    )
    return Prediction(peak_bytes=lambda rows: peak_bytes + each_bytes * (rows - size))


def ignores_size(
    fitted: Sequence[tuple[int, int]], *, exact: bool = True
) -> tuple[int, int] | None:
    """Return two sizes between which memory does not grow, although it should by far.

    A dataset with fewer samples than a batch ends the growth.

    Args:
        fitted: Peaks by size, ascending.
        exact: False if what earlier trials left counts too, as in one process. A
            single peak may then be too high, so no neighbours are compared.

    Returns:
        The two sizes, or None if there are none.
    """
    (least, first), (most, last) = fitted[0], fitted[-1]
    if most >= IGNORED_RATIO * least and last - first < LEAST_BYTES:
        return least, most
    if not exact:
        return None
    for (size, peak), (larger, higher), (largest, highest) in zip(
        fitted, fitted[1:], fitted[2:], strict=False
    ):
        expected_bytes = (higher - peak) / (larger - size) * (largest - larger)
        if highest - higher < LEAST_BYTES and expected_bytes > FLATTER * LEAST_BYTES:
            return larger, largest
    return None


def misses_steps(figures: StepFigures) -> bool:
    """Return whether torch's optimizers took fewer steps than the trial."""
    return figures.optimizer_steps < figures.steps
