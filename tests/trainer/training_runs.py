"""Runs of the trainer in this process, data for them, and readers of their records."""

import math
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

from testbed.examples.checkpoints import release_run, resolved_of
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import choose_run
from trainer.formats.events import EventRow
from trainer.formats.run_record import Run, RunExit, read_run
from trainer.health.watchdog import Watchdog
from trainer.loop import train
from trainer.runtime.ranks import join_ranks

RUN = "r"
"""Run directory, unless a test names another one."""
CHECKPOINTS = Path(RUN) / CHECKPOINTS_DIRECTORY
"""Checkpoints of a run in that directory."""


class _SignalledAfter(Watchdog):
    """Watchdog that receives SIGTERM after a number of steps; infinity is never."""

    def __init__(self, steps: float) -> None:
        super().__init__(timeout_s=math.inf)
        self._steps = steps

    @property
    def first_signal(self):
        return signal.SIGTERM.value if self.step >= self._steps else None


def train_or_resume(
    out=RUN,
    *,
    source="data",
    signal_after=math.inf,
    resume="auto",
    clock=None,
    **changes,
) -> tuple[Run, RunExit]:
    """Train a run, or the rest of it, as a separate process would.

    Args:
        out: Run directory.
        source: Directory of the dataset.
        signal_after: Number of finished steps, of all parts of the run, after which it
            receives SIGTERM.
        resume: Value of ``--resume``.
        clock: Clock of the process; None begins now.
        changes: Settings other than those of ``config_of``.

    Returns:
        The record of the run, and the exit of this part of it.
    """
    config = config_of(**changes)
    resolved = resolved_of(config, Path(source))
    writer, start = choose_run(Path(out), resume, resolved, environment={})
    try:
        ending = train(
            resolved,
            join_ranks(config, environment={}),
            writer,
            show=lambda row: None,
            start=start,
            watchdog=_SignalledAfter(signal_after),
            clock=clock,
        )
    finally:
        release_run(writer)
    return read_run(Path(out)), ending


def run_of(out=RUN, **changes) -> Run:
    """Train a run, and return its record; options are those of ``train_or_resume``."""
    run, _ = train_or_resume(out, **changes)
    return run


def varied_samples(count: int) -> list[list[int]]:
    """Return samples of 4 to 53 tokens, in which each token is one above the last.

    They have 60 different tokens, from 5 on.
    """
    return [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(count)
    ]


def weights_of(out: str | Path) -> dict[str, torch.Tensor]:
    """Return the weights that a finished run exported, by name."""
    return load_file(Path(out) / "model" / "model.safetensors")


def events_of(run: Run, kind: str) -> list[EventRow]:
    """Return the events of one kind."""
    return [event for event in run.events if event.kind == kind]
