"""Detection of a loss that stands still or rises. Pure, no torch here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.health.findings import Action, Finding, Kind
from trainer.health.robust_statistics import median_and_error, median_of_sorted

ERRORS_OF_A_FALL = 2.0
"""Smallest fall between the medians of both halves, in standard errors; a loss that
falls less stands still. By noise alone, a flat loss falls so far in 2 % of checks."""
ERRORS_OF_A_RISE = 4.0
"""Smallest rise between these medians, in standard errors. It is larger than that of a
fall, as noise must not look like a rise: every check that finds one reports it."""
MIN_WINDOW_BLOCKS = 20
"""Blocks in the shortest window: ten in each half, from whose differences the standard
error of a median is estimated."""
MAX_BLOCKS = 160
"""Largest number of blocks of a run, so that its checkpoints stay small."""
SMALLEST_CHANGE_SHARE = 0.001
"""Smallest change between these medians that is reported, as a share of the loss. A
smaller one does not matter, even if it exceeds the noise."""


class PlateauDetector:
    """Detector that compares the losses in both halves of a long window.

    Losses are reduced to blocks, the medians of a number of consecutive steps. The
    window is the last half of the run, but at least ``window_steps``, and is checked
    whenever half of it is new.
    """

    def __init__(self, saved: Mapping[str, Any], *, window_steps: int) -> None:
        """Start from a saved state, which may be empty.

        Args:
            saved: State as ``to_json`` returned it. Values that it lacks are those of
                a new run.
            window_steps: Length of the shortest window, at least 20.
        """
        self._window_steps = window_steps
        self._block_steps: int = saved.get("block_steps", 0)
        """Steps of each block; doubled each time that blocks are merged."""
        if not self._block_steps:
            self._block_steps = max(1, window_steps // MIN_WINDOW_BLOCKS)
        # Both lists are copied, as they may belong to a checkpoint.
        self._block_medians: list[float] = list(saved.get("blocks", ()))
        """Median loss of each block, in order."""
        self._open_block: list[float] = list(saved.get("block", ()))
        """Losses of the last block, which is not complete yet."""
        self._steps_at_last_check: int = saved.get("judged_at", 0)
        """Number of steps in blocks at the last check."""
        self._plateau_reported: bool = saved.get("is_told", False)
        """True if the loss stands still, and that was reported."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values, under the keys of checkpoints."""
        return {
            "window_steps": self._window_steps,
            "block_steps": self._block_steps,
            "blocks": list(self._block_medians),
            "block": list(self._open_block),
            "judged_at": self._steps_at_last_check,
            "is_told": self._plateau_reported,
        }

    def check(self, step: int, loss: float) -> list[Finding]:
        """Add the loss of a step, and return the findings, if a check is due.

        Call it once for each step, in order; steps are counted from 1.
        """
        self._open_block.append(loss)
        if len(self._open_block) < self._block_steps:
            return []
        self._block_medians.append(median_of_sorted(sorted(self._open_block)))
        self._open_block = []
        half_blocks = self._blocks_to_compare()
        if half_blocks == 0:
            return []
        self._steps_at_last_check = self._steps_in_blocks
        findings = self._compare_halves(
            step,
            first=self._block_medians[-2 * half_blocks : -half_blocks],
            second=self._block_medians[-half_blocks:],
        )
        self._merge_blocks()
        return findings

    @property
    def _steps_in_blocks(self) -> int:
        """Number of steps in all complete blocks."""
        return len(self._block_medians) * self._block_steps

    def _blocks_to_compare(self) -> int:
        """Return the number of blocks in half a window; 0 if no check is due."""
        steps = self._steps_in_blocks
        window_steps = max(self._window_steps, steps // 2)
        new_steps = steps - self._steps_at_last_check
        if steps < self._window_steps or new_steps < window_steps // 2:
            return 0
        # Also 0 if a run is resumed with a window that is shorter than its blocks.
        return window_steps // 2 // self._block_steps

    def _compare_halves(
        self, step: int, *, first: Sequence[float], second: Sequence[float]
    ) -> list[Finding]:
        """Compare the blocks of both halves of a window that ends at a step.

        Return a warning if the loss rises, or at the beginning of a plateau.
        """
        first_median, first_error = median_and_error(first)
        second_median, second_error = median_and_error(second)
        fall = first_median - second_median
        error = math.hypot(first_error, second_error)
        smallest_change = SMALLEST_CHANGE_SHARE * abs(first_median)
        least_fall = max(ERRORS_OF_A_FALL * error, smallest_change)
        least_rise = max(ERRORS_OF_A_RISE * error, smallest_change)
        values = {
            "first_median": first_median,
            "second_median": second_median,
            "improvement": fall,
            "error": error,
        }
        window_steps = 2 * len(second) * self._block_steps
        medians = (
            f"median {first_median:.4g} in the first half and {second_median:.4g} in"
            f" the second half of the last {window_steps} steps, at step {step}"
        )
        if -fall > least_rise:
            # A rise ends the plateau: the next one is reported again.
            self._plateau_reported = False
            return [_warning(Kind.RISE, f"the loss is rising: {medians}", values)]
        if fall >= least_fall:
            self._plateau_reported = False
            return []
        if self._plateau_reported:
            return []
        self._plateau_reported = True
        message = (
            f"the loss has stopped falling: {medians} (changed by {-fall:+.2g};"
            f" a fall is at least {least_fall:.2g})"
        )
        return [_warning(Kind.PLATEAU, message, values)]

    def _merge_blocks(self) -> None:
        """Merge pairs of blocks if there are too many; an odd first one is dropped."""
        while len(self._block_medians) > MAX_BLOCKS:
            even_blocks = self._block_medians[len(self._block_medians) % 2 :]
            pairs = zip(even_blocks[::2], even_blocks[1::2], strict=True)
            # Halved first: the sum of two finite values need not be finite.
            self._block_medians = [earlier / 2 + later / 2 for earlier, later in pairs]
            self._block_steps *= 2
            self._steps_at_last_check = self._steps_in_blocks


def _warning(kind: Kind, message: str, values: dict[str, float]) -> Finding:
    return Finding(kind=kind, action=Action.WARN, message=message, values=values)
