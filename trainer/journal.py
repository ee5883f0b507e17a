"""Where the rows of a run go: its record, TensorBoard where that is installed, and the progress bar."""

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from trainer.events import EventRow, happened
from trainer.record import TENSORBOARD_DIRECTORY, EvaluationRow, RunHeader, StepRow
from trainer.schema import Table
from trainer.writer import RunWriter


class Screen(Protocol):
    """Who watches on rank 0."""

    def begin(self, header: RunHeader) -> None:
        """The run begins."""

    def step(self, row: StepRow) -> None:
        """A step was logged."""

    def evaluation(self, row: EvaluationRow) -> None:
        """The model was held against the validation split."""

    def event(self, row: EventRow) -> None:
        """Something happened that people may want to know of."""


class Journal:
    """Writes rows everywhere; on other ranks than the first, only the step's number is kept."""

    def __init__(self, writer: RunWriter, screen: Screen, header: RunHeader, *, active: bool) -> None:
        self._writer, self._screen, self._active = writer, screen, active
        self._board: Any = None
        self._told_trouble: str | None = None
        writer.start(header)
        if not active:
            return
        screen.begin(header)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # an extra: the record holds the same numbers
            return
        # What an earlier start drew of steps that are taken again is hidden.
        again = header.resumed_step + 1 if header.attempt > 1 else None
        with contextlib.suppress(OSError):  # the record holds the same numbers
            self._board = SummaryWriter(log_dir=str(writer.directory / TENSORBOARD_DIRECTORY), purge_step=again)

    def _tell_trouble(self, step: int) -> None:
        """Once, when rows begin to wait; they are kept until they can be written."""
        trouble = self._writer.trouble
        if self._active and trouble is not None and trouble != self._told_trouble:
            self._screen.event(
                happened(
                    step,
                    "record_waits",
                    f"cannot write to {self._writer.directory}: {trouble}; rows wait, and training goes on",
                    level="error",
                    next_step="Free room, or raise the quota: what waits is then written.",
                )
            )
        self._told_trouble = trouble

    def steps(self, rows: Iterable[StepRow]) -> None:
        """Write logged steps."""
        for row in rows:
            self._writer.step(row)
            self._tell_trouble(row.step)
            self._draw("train", row, row.step)
            if self._active:
                self._screen.step(row)

    def evaluation(self, row: EvaluationRow) -> None:
        """Write an evaluation."""
        self._writer.evaluation(row)
        self._draw("validation", row, row.step)
        if self._active:
            self._screen.evaluation(row)

    def event(self, row: EventRow) -> None:
        """Write an event."""
        self._writer.event(row)
        if self._active:
            self._screen.event(row)

    def close(self) -> None:
        """Flush the files."""
        if self._board is not None:
            with contextlib.suppress(OSError):  # the record has the same numbers
                self._board.close()

    def _draw(self, group: str, row: Table, step: int) -> None:
        if self._board is None:
            return
        try:
            for name, value in row.model_dump(exclude={"step"}).items():
                if value is not None:
                    self._board.add_scalar(f"{group}/{name}", value, step)
        except OSError:
            self._board = None  # its file is torn; the record has the same numbers
