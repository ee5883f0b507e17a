"""Boards: loggers that get the numbers of a run, in addition to its record.

A logger is imported only if it is used.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.tables import canonical_sha256
from trainer.config.train_config import Logger
from trainer.errors import BadConfig
from trainer.health.events import EventRow, new_event
from trainer.record.run_record import (
    RUN_FILE,
    TENSORBOARD_DIRECTORY,
    WANDB_DIRECTORY,
    RunHeader,
    read_first_header,
)
from trainer.record.writer import Board, board_failed

ReportEvent = Callable[[EventRow], None]

_WANDB_DEFAULTS: Mapping[str, Any] = {
    "project": "encoder-autotune",
    "console": "off",
    "init_timeout": 30.0,
    "finish_timeout": 10.0,
}
"""Settings of W&B that are not in its environment variables. Without a server, its own
timeouts take minutes."""


def check_installed(log_to: Sequence[Logger] | None) -> None:
    """Raise ``BadConfig`` if a logger that you named is not installed."""
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
    report: ReportEvent,
) -> list[Board]:
    """Open the boards of a run. A board that fails is left out.

    Args:
        log_to: Loggers; None is TensorBoard, if it is installed.
        directory: Run directory.
        header: Header of the run record.
        attempt: Number of this start of the run, counted from 1.
        report: Callback that receives events of failures.
    """
    if log_to is None:
        log_to = ["tensorboard"] if _is_installed("tensorboard") else []
    boards: list[Board] = []
    for name in dict.fromkeys(log_to):  # each once
        try:
            if name == "wandb":
                boards.append(WandbBoard(directory, header, report))
            else:
                boards.append(TensorBoardBoard(directory, header, attempt))
        except Exception as error:  # noqa: BLE001 - the border: no error of a logger may end a run
            report(board_failed(header.resumed_step, name, error))
    return boards


class TensorBoardBoard:
    """Event file of TensorBoard."""

    name: Logger = "tensorboard"

    def __init__(self, directory: Path, header: RunHeader, attempt: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides points of an earlier start for steps that are repeated.
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
    """Run of Weights & Biases.

    Without its server or an API key, it writes files that ``wandb sync`` uploads later.
    """

    name: Logger = "wandb"

    def __init__(self, directory: Path, header: RunHeader, report: ReportEvent) -> None:
        import wandb

        options = _wandb_options(directory, header)
        try:
            # Without an API key, W&B would ask for one at a terminal, and fail
            # elsewhere.
            is_online = wandb.setup().settings.mode == "online"
            lacks_key = is_online and not wandb.login(prompt=False)
            self._run = wandb.init(mode="offline" if lacks_key else None, **options)
        except wandb.Error as error:
            report(_not_online(directory, header.resumed_step, error))
            wandb.teardown()  # releases the id
            self._run = wandb.init(mode="offline", **options)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step.

        W&B ignores steps below its last one, which a rollback or a new start repeats.
        """
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Upload what is left, for a limited time.

        The rest stays on disk for ``wandb sync``.
        """
        self._run.finish()


def _wandb_options(directory: Path, header: RunHeader) -> dict[str, Any]:
    """Return the options of ``wandb.init``, without the mode."""
    import wandb

    unset = {
        name: value
        for name, value in _WANDB_DEFAULTS.items()
        if f"WANDB_{name.upper()}" not in os.environ
    }
    run_name = directory.absolute().name
    return {
        "dir": directory,
        "id": os.environ.get("WANDB_RUN_ID", _wandb_id(directory, header)),
        "resume": "allow",
        "name": os.environ.get("WANDB_NAME", run_name),
        "settings": wandb.Settings(**unset),
        "config": (
            {"train": header.config}
            | header.model_dump(mode="json", exclude={"config", "sources"})
        ),
        "reinit": "create_new",  # any other W&B run of this process stays separate
    }


def _wandb_id(directory: Path, header: RunHeader) -> str:
    """Return an id that is the same for all starts of a run."""
    first = header
    if (directory / RUN_FILE).exists():
        first = read_first_header(directory)
    identity = [
        directory.absolute().name,
        first.started_utc,
        first.hosts,
        first.config_sha256,
    ]
    return canonical_sha256(identity)[:16]


def _not_online(directory: Path, step: int, error: Exception) -> EventRow:
    """Return the event of a W&B server that cannot be used."""
    why = str(error).partition("\n")[0]
    return new_event(
        step,
        "board_failed",
        f"cannot log to wandb online: {why}; its files are written to the run"
        " directory",
        level="warning",
        next_step=(
            "Upload them after the run: wandb sync"
            f" {directory / WANDB_DIRECTORY}/offline-run-*"
        ),
    )


def _is_installed(name: Logger) -> bool:
    spec = find_spec(name)
    # A directory of that name, such as W&B writes to, is found too, without an origin.
    return spec is not None and spec.origin is not None
