"""Detection of a loss that stands still or rises. Pure, no torch here."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.health.events import Action, Finding, Kind
from trainer.health.robust_statistics import median_and_error, median_of_sorted

ERRORS_OF_A_FALL = 2.0
"""Standard errors by which the loss must fall between two medians, or it stands
still."""
ERRORS_OF_A_RISE = 4.0
"""Standard errors above which a rise exceeds noise; higher, as a rise is reported each
time it is found."""
FEWEST_BLOCKS = 20
"""Number of blocks in the shortest window."""
MOST_BLOCKS = 160
"""Largest number of blocks in the whole run."""
SMALLEST_CHANGE_SHARE = 0.001
"""Smallest relevant change in half a plateau window, as a share of the loss, even if it
is significant."""


@dataclass(slots=True, kw_only=True)
class Plateau:
    """Detector that compares block medians of both halves of a long window.

    The window is the last half of the run, at least ``window_steps``, and is checked
    each time half of it is new. The names of the fields are keys of checkpoints.
    """

    window_steps: int
    block_steps: int = 0
    """Steps of which a block is the median; it doubles as the run becomes longer."""
    blocks: list[float] = dataclasses.field(default_factory=list)
    block: list[float] = dataclasses.field(default_factory=list)
    """Losses of the block that is not complete yet."""
    judged_at: int = 0
    """Number of steps in blocks at the last check."""
    is_told: bool = False
    """True if the present plateau was reported."""

    def __post_init__(self) -> None:
        if not self.block_steps:
            self.block_steps = max(1, self.window_steps // FEWEST_BLOCKS)
        # Copies, as these may belong to a checkpoint.
        self.blocks = list(self.blocks)
        self.block = list(self.block)

    def check(self, step: int, loss: float) -> list[Finding]:
        """Add the loss of a step, and return the findings, if a check is due.

        Call it once for each step, in order; steps are counted from 1.
        """
        self.block.append(loss)
        if len(self.block) < self.block_steps:
            return []
        self.blocks.append(median_of_sorted(sorted(self.block)))
        self.block = []
        steps = len(self.blocks) * self.block_steps
        window_steps = max(self.window_steps, steps // 2)
        half_blocks = window_steps // 2 // self.block_steps
        is_due = (
            steps >= self.window_steps
            and steps - self.judged_at >= window_steps // 2
            and half_blocks > 0
        )
        if not is_due:
            return []
        self.judged_at = steps
        findings = self._compare_halves(
            step,
            first=self.blocks[-2 * half_blocks : -half_blocks],
            second=self.blocks[-half_blocks:],
        )
        self._merge_blocks()
        return findings

    def _compare_halves(
        self, step: int, *, first: Sequence[float], second: Sequence[float]
    ) -> list[Finding]:
        """Compare the blocks of both halves of a window that ends at a step.

        Return a warning if the loss rises, or at the beginning of a plateau.
        """
        first_median, first_error = median_and_error(first)
        second_median, second_error = median_and_error(second)
        improvement = first_median - second_median
        error = math.hypot(first_error, second_error)
        smallest_change = SMALLEST_CHANGE_SHARE * abs(first_median)
        least_fall = max(ERRORS_OF_A_FALL * error, smallest_change)
        least_rise = max(ERRORS_OF_A_RISE * error, smallest_change)
        values = {
            "first_median": first_median,
            "second_median": second_median,
            "improvement": improvement,
            "error": error,
        }
        window_steps = 2 * len(second) * self.block_steps
        medians = (
            f"median {first_median:.4g} in the first half and {second_median:.4g} in"
            f" the second half of the last {window_steps} steps, at step {step}"
        )
        if -improvement > least_rise:
            return [_warning(Kind.RISE, f"the loss is rising: {medians}", values)]
        was_on_plateau = self.is_told
        self.is_told = improvement < least_fall
        if was_on_plateau or not self.is_told:
            return []
        message = (
            f"the loss has stopped falling: {medians} (changed by {-improvement:+.2g};"
            f" a fall is at least {least_fall:.2g})"
        )
        return [_warning(Kind.PLATEAU, message, values)]

    def _merge_blocks(self) -> None:
        """Merge pairs of blocks if there are too many; an odd first one is dropped.

        So a checkpoint stays small however long the run.
        """
        while len(self.blocks) > MOST_BLOCKS:
            even_blocks = self.blocks[len(self.blocks) % 2 :]
            pairs = zip(even_blocks[::2], even_blocks[1::2], strict=True)
            # Halved first: the sum of two finite values need not be finite.
            self.blocks = [earlier / 2 + later / 2 for earlier, later in pairs]
            self.block_steps *= 2
            self.judged_at = len(self.blocks) * self.block_steps


def _warning(kind: Kind, message: str, values: dict[str, float]) -> Finding:
    return Finding(kind=kind, action=Action.WARN, message=message, values=values)
