"""Where the rows of a run go: its record, TensorBoard where that is installed, and the progress bar."""

from collections.abc import Callable, Iterable
from typing import Any

from trainer.record import TENSORBOARD_DIRECTORY, EvaluationRow, RunWriter, StepRow
from trainer.schema import Table

Announce = Callable[[StepRow, int], None]
"""Called on rank 0 with a logged step and the number of steps of the run."""


class Journal:
    """Writes rows everywhere; on other ranks than the first, only the step's number is kept."""

    def __init__(self, writer: RunWriter, announce: Announce, *, steps: int, active: bool) -> None:
        self._writer, self._announce, self._steps, self._active = writer, announce, steps, active
        self._board: Any = None
        if active:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # an extra: the record holds the same numbers
                return
            self._board = SummaryWriter(log_dir=str(writer.directory / TENSORBOARD_DIRECTORY))

    def steps(self, rows: Iterable[StepRow]) -> None:
        """Write logged steps."""
        for row in rows:
            self._writer.step(row)
            self._draw("train", row, row.step)
            if self._active:
                self._announce(row, self._steps)

    def evaluation(self, row: EvaluationRow) -> None:
        """Write an evaluation."""
        self._writer.evaluation(row)
        self._draw("validation", row, row.step)

    def close(self) -> None:
        """Flush the files."""
        if self._board is not None:
            self._board.close()

    def _draw(self, group: str, row: Table, step: int) -> None:
        if self._board is None:
            return
        for name, value in row.model_dump(exclude={"step"}).items():
            if value is not None:
                self._board.add_scalar(f"{group}/{name}", value, step)
