"""Starts of runs, as ``choose_run`` chooses them, and damage to their checkpoints."""

from pathlib import Path

import pytest

from testbed.examples.checkpoints import release_run, resolved_of
from tests.trainer.checkpoint.saves import SHARE
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import Start, choose_run
from trainer.formats.errors import BadConfig, TrainingFailed
from trainer.formats.train_config import TrainConfig
from trainer.record.writer import RunWriter

CONFIG = config_of(max_steps=20)
LOWER_RATE = config_of(max_steps=20, learning_rate=1e-5)
"""The configuration with a setting that may change on resume."""
GAVE_UP = TrainingFailed.exit_code


def choose(
    out: Path | None,
    resume: str | Path = "auto",
    *,
    config: TrainConfig = CONFIG,
    environment: dict[str, str] | None = None,
) -> tuple[RunWriter, Start]:
    """Return the writer and the start that ``choose_run`` chooses.

    The run is released, as at the end of a process, so that it can be opened again.
    """
    opened: list[RunWriter] = []
    try:
        return choose_run(
            out,
            str(resume),
            resolved_of(config),
            environment=environment or {},
            on_open=opened.append,
        )
    finally:
        for writer in opened:
            release_run(writer)


def assert_rejected(out: Path | None, resume: str | Path, *, message: str) -> None:
    """Assert that a start is rejected with a message and a next step."""
    with pytest.raises(BadConfig, match=message) as raised:
        choose(out, resume)
    assert raised.value.next_step
    # ``autotune train`` has no option ``--resume never``.
    assert "--resume never" not in raised.value.next_step


def messages_of(start: Start) -> list[str]:
    return [event.message for event in start.events]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS_DIRECTORY / f"step-{step:09d}"


def corrupt(*checkpoints: Path) -> None:
    """Truncate the file of tensors in each checkpoint."""
    for path in checkpoints:
        (path / SHARE).write_bytes(b"short")


def names_in(run: Path) -> list[str]:
    """Return the names of all checkpoints of a run, also of those put aside."""
    return sorted(path.name for path in (run / CHECKPOINTS_DIRECTORY).glob("step-*"))
