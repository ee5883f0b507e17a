"""The steps of a run as TensorBoard curves, where tensorboard is installed."""

from pathlib import Path

from trainer.record import TENSORBOARD_DIRECTORY, StepRow


class Monitor:
    """Writes TensorBoard event files; without tensorboard, or on other ranks than the first, it does nothing."""

    def __init__(self, run_directory: Path, *, active: bool) -> None:
        self._board = None
        if active:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # an extra: steps.jsonl holds the same numbers
                return
            self._board = SummaryWriter(log_dir=str(run_directory / TENSORBOARD_DIRECTORY))

    def step(self, row: StepRow) -> None:
        """Add a step to every curve."""
        if self._board is None:
            return
        for name, value in row.model_dump(exclude={"step"}).items():
            self._board.add_scalar(f"train/{name}", value, row.step)

    def close(self) -> None:
        """Flush the files."""
        if self._board is not None:
            self._board.close()
