"""Whether the loss still falls, by robust statistics. Pure, no torch here.

It is asked of the last half of the run, which grows with it: what 2,000 steps gain late in a healthy run is less than
their noise. Scatter is the median absolute deviation (MAD), times 1.4826, which is the standard deviation where values
are normal (Rousseeuw and Croux 1993): up to half of the values cannot move it far.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.events import Action, Finding, Kind, finding

SIGMAS_PER_MAD = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median in units of sigma / sqrt(n): sqrt(pi / 2), asymptotically and for normal values."""


def level_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """Where values are now, and their robust standard deviation around where they were on the way."""
    whole, scatter = centre_and_scatter(sorted(values))
    half = len(values) // 2
    first, second = middle(sorted(values[:half])), middle(sorted(values[-half:]))
    if second >= first:
        return whole, scatter
    slope = (second - first) / (len(values) - half)
    middle_of_first = (half - 1) / 2
    around = [value - first - slope * (place - middle_of_first) for place, value in enumerate(values)]
    return min(whole, second), min(scatter, centre_and_scatter(sorted(around))[1])


def median_and_error(blocks: Sequence[float]) -> tuple[float, float]:
    """The median of blocks of steps, and its standard error.

    The scatter is that of neighbours' differences, to which the slope of a fall or a rise adds nothing.
    """
    differences = sorted([abs(one - other) for one, other in itertools.pairwise(blocks)])
    sigma = SIGMAS_PER_MAD * middle(differences) / math.sqrt(2) if differences else 0.0
    return middle(sorted(blocks)), MEDIAN_ERROR * sigma / math.sqrt(len(blocks))


def centre_and_scatter(ordered: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation of values in order."""
    centre = middle(ordered)
    # Two runs in order, which sorting only has to merge.
    deviations = sorted([abs(value - centre) for value in ordered])
    return centre, SIGMAS_PER_MAD * middle(deviations)


def middle(ordered: Sequence[float]) -> float:
    """The median of values in order."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    # Halved first: the sum of two finite values need not be finite.
    return ordered[half - 1] / 2 + ordered[half] / 2


ERRORS_THAT_TELL, ERRORS_OF_A_RISE = 2.0, 4.0
"""Standard errors that a fall, or a rise, between two medians must have to be more than noise. It is asked often, and a
rise is always told."""
FEWEST_BLOCKS, MOST_BLOCKS = 20, 160
"""Of the shortest window, and of the whole run."""
SMALLEST_CHANGE_SHARE = 0.001
"""Of the loss: less than that in half a plateau window is no change worth the time, however sure it is."""


class Plateau:
    """Whether the loss still falls: both halves of a long window, each time half of it is new.

    The window is the last half of the run, and not shorter than asked for. Medians of blocks of steps stand for it, of
    so many steps that there are never many blocks.
    """

    def __init__(self, window_steps: int, saved: Mapping[str, Any]) -> None:
        self._window_steps = window_steps
        self._block_steps: int = saved.get("block_steps", max(1, window_steps // FEWEST_BLOCKS))
        self._blocks: list[float] = list(saved.get("blocks", ()))
        self._block: list[float] = list(saved.get("block", ()))
        self._judged_at: int = saved.get("judged_at", 0)
        self._is_told: bool = saved.get("is_told", False)

    def look(self, step: int, loss: float) -> list[Finding]:
        """What a step's loss shows, counted from 1; each is shown once, in order."""
        self._block.append(loss)
        if len(self._block) < self._block_steps:
            return []
        self._blocks.append(middle(sorted(self._block)))
        self._block = []
        steps = len(self._blocks) * self._block_steps
        window_steps = max(self._window_steps, steps // 2)
        half = window_steps // 2 // self._block_steps
        if steps < self._window_steps or steps - self._judged_at < window_steps // 2 or not half:
            return []
        self._judged_at = steps
        first, first_error = median_and_error(self._blocks[-2 * half : -half])
        second, second_error = median_and_error(self._blocks[-half:])
        self._join_blocks()
        error = math.hypot(first_error, second_error)
        values = {"first_median": first, "second_median": second, "improvement": first - second, "error": error}
        return self._judge(step, 2 * half * self._block_steps, values)

    def _join_blocks(self) -> None:
        """Make longer ones, two into one, where there are many; what does not come out even is left out."""
        while len(self._blocks) > MOST_BLOCKS:
            even = self._blocks[len(self._blocks) % 2 :]
            self._blocks = [one / 2 + other / 2 for one, other in zip(even[::2], even[1::2], strict=True)]
            self._block_steps *= 2
            self._judged_at = len(self._blocks) * self._block_steps

    def _judge(self, step: int, window_steps: int, values: Mapping[str, float]) -> list[Finding]:
        improvement, smallest = values["improvement"], SMALLEST_CHANGE_SHARE * abs(values["first_median"])
        telling = max(ERRORS_THAT_TELL * values["error"], smallest)
        medians = f"the median loss of {window_steps} steps up to step {step} went from"
        medians += f" {values['first_median']:.4g} in their first half to {values['second_median']:.4g} in their second"
        if improvement < -max(ERRORS_OF_A_RISE * values["error"], smallest):
            return [finding(Kind.RISE, Action.WARN, f"the loss rises: {medians}", values)]
        if improvement >= telling:
            self._is_told = False
            return []
        if self._is_told:
            return []
        self._is_told = True
        message = f"the loss stands still: {medians}, a fall of {improvement:.2g} where {telling:.2g} tells"
        return [finding(Kind.PLATEAU, Action.WARN, message, values)]

    def to_json(self) -> dict[str, Any]:
        """The whole state."""
        return {
            "block_steps": self._block_steps,
            "blocks": list(self._blocks),
            "block": list(self._block),
            "judged_at": self._judged_at,
            "is_told": self._is_told,
        }
