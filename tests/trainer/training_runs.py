"""Runs of the trainer in this process, and readers of their records."""

import math
import signal
from pathlib import Path

from safetensors.torch import load_file

from testbed.examples.checkpoints import release_run, resolved_of
from tests.trainer.oracles import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import choose_run
from trainer.distributed.ranks import join_ranks
from trainer.health import controller
from trainer.health.events import EventRow
from trainer.health.watchdog import Watchdog
from trainer.loop import train
from trainer.record.run_record import Run, RunExit, read_run

CHECKPOINTS = Path("r") / CHECKPOINTS_DIRECTORY
"""Checkpoints of a run in the default directory."""


class _SignalledAfter(Watchdog):
    """Watchdog that receives SIGTERM after a number of steps; infinity is never."""

    def __init__(self, steps: float) -> None:
        super().__init__(timeout_s=math.inf)
        self._steps = steps

    @property
    def first_signal(self):
        return signal.SIGTERM.value if self.step >= self._steps else None


def train_or_resume(
    out="r",
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
    writer, start = choose_run(Path(out), resume, resolved, {})
    try:
        ending = train(
            resolved,
            join_ranks(config, environment={}),
            writer,
            lambda row: None,
            start=start,
            watchdog=_SignalledAfter(signal_after),
            clock=clock,
        )
    finally:
        release_run(writer)
    return read_run(Path(out)), ending


def run_of(out="r", **changes) -> Run:
    """Train a run, and return its record."""
    run, _ = train_or_resume(out, **changes)
    return run


def weights_of(out: str):
    """Return the weights that a finished run exported, by name."""
    return load_file(Path(out) / "model" / "model.safetensors")


def events_of(run: Run, kind: str) -> list[EventRow]:
    """Return the events of one kind."""
    return [event for event in run.events if event.kind == kind]


def read_late(monkeypatch) -> None:
    """Let metrics be read as late on a CPU as on a GPU: two steps later."""
    steps_behind = controller._STEPS_BEHIND
    monkeypatch.setitem(steps_behind, "cpu", steps_behind["cuda"])
