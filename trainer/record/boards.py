"""Boards: the loggers that get the numbers of a run, beside its record.

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

Tell = Callable[[EventRow], None]

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
        if not _installed(name):
            next_step = (
                f"Install it: pip install '.[{name}]'; or name others in train.log_to"
            )
            raise BadConfig(
                f"train.log_to requires {name}, which is not installed",
                next_step=next_step,
            )


def open_boards(
    log_to: Sequence[Logger] | None,
    directory: Path,
    header: RunHeader,
    attempt: int,
    tell: Tell,
) -> list[Board]:
    """Open the boards of a run, by default TensorBoard if it is installed.

    ``tell`` receives events of failures.
    """
    default: tuple[Logger, ...] = ("tensorboard",) if _installed("tensorboard") else ()
    boards: list[Board] = []
    for name in dict.fromkeys(default if log_to is None else log_to):
        try:
            if name == "wandb":
                boards.append(WandbBoard(directory, header, tell))
            else:
                boards.append(TensorBoardBoard(directory, header, attempt))
        except Exception as error:  # noqa: BLE001 - the border: no error of a logger may end a run
            tell(board_failed(header.resumed_step, name, error))
    return boards


class TensorBoardBoard:
    """Event file of TensorBoard."""

    name: Logger = "tensorboard"

    def __init__(self, directory: Path, header: RunHeader, attempt: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides points of an earlier start for steps that are repeated.
        again = header.resumed_step + 1 if attempt > 1 else None
        self._writer: Any = SummaryWriter(
            log_dir=str(directory / TENSORBOARD_DIRECTORY), purge_step=again
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

    Without its server or an API key, files that ``wandb sync`` uploads later.
    """

    name: Logger = "wandb"

    def __init__(self, directory: Path, header: RunHeader, tell: Tell) -> None:
        import wandb

        unset = {
            name: value
            for name, value in _WANDB_DEFAULTS.items()
            if f"WANDB_{name.upper()}" not in os.environ
        }
        first = (
            read_first_header(directory) if (directory / RUN_FILE).exists() else header
        )
        # The same for all starts of a run.
        own_id = canonical_sha256(
            [
                directory.absolute().name,
                first.started_utc,
                first.hosts,
                first.config_sha256,
            ]
        )[:16]
        options: dict[str, Any] = {
            "dir": directory,
            "id": os.environ.get("WANDB_RUN_ID", own_id),
            "resume": "allow",
            "name": os.environ.get("WANDB_NAME", directory.absolute().name),
            "settings": wandb.Settings(**unset),
            "config": (
                {"train": header.config}
                | header.model_dump(mode="json", exclude={"config", "sources"})
            ),
            "reinit": "create_new",  # any other W&B run of this process stays separate
        }
        try:
            # Without an API key, W&B would ask for one at a terminal, and fail
            # elsewhere.
            keyless = wandb.setup().settings.mode == "online" and not wandb.login(
                prompt=False
            )
            self._run = wandb.init(mode="offline" if keyless else None, **options)
        except wandb.Error as error:
            why = str(error).partition("\n")[0]
            message = (
                f"cannot log to wandb online: {why}; its files are written to the run"
                " directory"
            )
            next_step = (
                "Upload them after the run: wandb sync"
                f" {directory / WANDB_DIRECTORY}/offline-run-*"
            )
            tell(
                new_event(
                    header.resumed_step,
                    "board_failed",
                    message,
                    level="warning",
                    next_step=next_step,
                )
            )
            wandb.teardown()  # releases the id
            self._run = wandb.init(mode="offline", **options)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step.

        W&B ignores steps below its last one, which a rollback or a new start repeats.
        """
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Upload what is left, for a limited time: the rest stays on disk for ``wandb sync``."""
        self._run.finish()


def _installed(name: Logger) -> bool:
    spec = find_spec(name)
    # A directory of that name, such as W&B writes to, is found too, without an origin.
    return spec is not None and spec.origin is not None
