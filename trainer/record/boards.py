"""Boards, which get the numbers of a run in addition to its record.

A logger is a library that ``train.log_to`` names, imported only if it is named; a board
is a logger's log of one run, open for writing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow, new_event
from trainer.formats.run_record import (
    RUN_FILE,
    TENSORBOARD_DIRECTORY,
    WANDB_DIRECTORY,
    RunHeader,
    read_first_header,
)
from trainer.formats.train_config import Logger
from trainer.record.writer import Board, board_failed_event

ReportEvent = Callable[[EventRow], None]
"""Callback that receives the events of boards that fail."""

_WANDB_DEFAULTS: Mapping[str, Any] = {
    "project": "encoder-autotune",
    "console": "off",
    "init_timeout": 30.0,
    "finish_timeout": 10.0,
}
"""Settings of W&B, unless its environment variables have others. Its own timeouts are
minutes, for which a run would wait if the server cannot be reached."""
_WANDB_ID_LENGTH = 16
"""Characters of the hash in a W&B run's id: enough that ids of two runs differ."""


def check_installed(log_to: Sequence[Logger] | None) -> None:
    """Check that all loggers that you named are installed.

    Raises:
        BadConfig: If one is not.
    """
    for name in log_to or ():
        if not _is_installed(name):
            raise BadConfig(
                f"train.log_to requires {name}, which is not installed",
                next_step=(
                    f"Install it: pip install '.[{name}]'; or name others in"
                    " train.log_to"
                ),
            )


def open_boards(
    log_to: Sequence[Logger] | None,
    directory: Path,
    header: RunHeader,
    attempt: int,
    report_event: ReportEvent,
) -> list[Board]:
    """Open the boards of a run; report boards that fail, and leave them out.

    Args:
        log_to: Names of loggers; None is TensorBoard, if it is installed.
        directory: Run directory.
        header: Header of the run record.
        attempt: Number of this start of the run, counted from 1.
        report_event: Callback that receives events of failures.
    """
    if log_to is None:
        log_to = ["tensorboard"] if _is_installed("tensorboard") else []
    boards: list[Board] = []
    for name in dict.fromkeys(log_to):  # a logger that is named twice is opened once
        try:
            if name == "wandb":
                boards.append(WandbBoard(directory, header, report_event))
            else:
                boards.append(TensorBoardBoard(directory, header, attempt))
        except Exception as error:  # noqa: BLE001 - the border: no error of a logger may end a run
            report_event(board_failed_event(header.resumed_step, name, error))
    return boards


class TensorBoardBoard:
    """Board of TensorBoard: a file of events in the run directory."""

    name: Logger = "tensorboard"

    def __init__(self, directory: Path, header: RunHeader, attempt: int) -> None:
        # TensorBoard is an optional package.
        from torch.utils.tensorboard import SummaryWriter

        # It hides the points of an earlier start from this step on, as this start
        # repeats its steps.
        purge_step = header.resumed_step + 1 if attempt > 1 else None
        self._writer: Any = SummaryWriter(
            log_dir=str(directory / TENSORBOARD_DIRECTORY), purge_step=purge_step
        )

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbBoard:
    """Board of Weights & Biases: one of its runs.

    Without its server or an API key, it writes files that ``wandb sync`` uploads later.
    Only an unusable server is reported: to have no API key is a way to log offline.
    """

    name: Logger = "wandb"

    def __init__(
        self, directory: Path, header: RunHeader, report_event: ReportEvent
    ) -> None:
        # W&B is an optional package.
        import wandb

        options = _wandb_options(directory, header)
        try:
            # Without an API key, W&B would ask for one at a terminal, and fail
            # elsewhere.
            is_online = wandb.setup().settings.mode == "online"
            lacks_key = is_online and not wandb.login(prompt=False)
            self._run = wandb.init(mode="offline" if lacks_key else None, **options)
        except wandb.Error as error:
            report_event(_offline_event(directory, header.resumed_step, error))
            wandb.teardown()  # releases the run's id, which is used again
            self._run = wandb.init(mode="offline", **options)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step.

        A rollback or a resume repeats steps; of these, W&B keeps the first numbers.
        """
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Upload the remaining numbers, for as long as ``finish_timeout``.

        Numbers that are not uploaded by then stay on disk for ``wandb sync``.
        """
        self._run.finish()


def _wandb_options(directory: Path, header: RunHeader) -> dict[str, Any]:
    """Return the options of ``wandb.init``, without the mode."""
    # W&B is an optional package.
    import wandb

    settings = {
        name: value
        for name, value in _WANDB_DEFAULTS.items()
        if f"WANDB_{name.upper()}" not in os.environ
    }
    recorded = header.model_dump(mode="json", exclude={"config", "sources"})
    return {
        "dir": directory,
        "id": os.environ.get("WANDB_RUN_ID", _wandb_id(directory, header)),
        "resume": "allow",
        "name": os.environ.get("WANDB_NAME", directory.absolute().name),
        "settings": wandb.Settings(**settings),
        "config": {"train": header.config, **recorded},
        "reinit": "create_new",  # any other W&B run of this process stays separate
    }


def _wandb_id(directory: Path, header: RunHeader) -> str:
    """Return an id that is the same for all starts of a run."""
    first_header = header
    if (directory / RUN_FILE).exists():
        first_header = read_first_header(directory)
    identity = [
        directory.absolute().name,
        first_header.started_utc,
        first_header.hosts,
        first_header.config_sha256,
    ]
    return canonical_sha256(identity)[:_WANDB_ID_LENGTH]


def _offline_event(directory: Path, step: int, error: Exception) -> EventRow:
    """Return the event of a W&B server that cannot be used: upload the files later."""
    reason, _, _ = str(error).partition("\n")
    return new_event(
        step,
        "board_failed",
        f"cannot log to wandb online: {reason}; its files are written to the run"
        " directory",
        level="warning",
        next_step=(
            "Upload them after the run: wandb sync"
            f" {directory / WANDB_DIRECTORY}/offline-run-*"
        ),
    )


def _is_installed(name: Logger) -> bool:
    spec = find_spec(name)
    # A plain directory ``wandb``, as W&B makes for its files, is found as well, but has
    # no origin.
    return spec is not None and spec.origin is not None
