"""State of runs and tunings from their records alone.

It is available on any node that sees the files.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.trials.decide.run_rates import check_run
from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY, read_trial_records
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.formats.errors import TrainerError, TrainingFailed
from trainer.formats.run_record import RUN_FILE, STEPS_FILE, Run, read_run
from trainer.health.watchdog import REQUEUE

Jobs = Mapping[str, tuple[str, str]]
"""Id and state of SLURM jobs, by job name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a training run."""

    directory: str
    state: str
    """State, such as ``finished`` or ``running``."""
    job: str | None = None
    """SLURM job that is queued or running for the run; None if there is none, or if
    SLURM cannot be queried."""
    step: int | None = None
    max_steps: int | None = None
    tokens_per_s: float | None = None
    checkpoint: str | None = None
    reason: str | None = None
    seconds_since_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """State of a tuning, from its trial log."""

    directory: str
    trials: int
    outcomes: Mapping[str, int]
    newest_utc: str | None
    newest: str | None
    corrupt_lines: int


def run_status(directory: Path, jobs: Jobs | None) -> RunStatus:
    """Return the state of a run.

    A run that has not begun has the state of its job, if SLURM can be queried.
    """
    number, queued = (jobs or {}).get(f"train-{directory.name}", (None, None))
    if not (directory / RUN_FILE).is_file():
        return RunStatus(
            directory=str(directory),
            state="queued" if queued == "PENDING" else "not started",
            job=number,
        )
    try:
        run = read_run(directory)
    except TrainerError as error:
        return RunStatus(
            directory=str(directory),
            state="unreadable",
            job=number,
            reason=error.message,
        )
    last, measured = run.steps[-1] if run.steps else None, False
    with contextlib.suppress(AutotuneError):  # fails for rates of a simulated GPU
        check_run(run)
        measured = True
    newest, age_s = list_checkpoints(directory / CHECKPOINTS_DIRECTORY)[:1], None
    with contextlib.suppress(OSError):
        age_s = max(0.0, time.time() - (directory / STEPS_FILE).stat().st_mtime)
    return RunStatus(
        directory=str(directory),
        state=_state(run, queued, asked=jobs is not None),
        job=number,
        step=last.step if last else run.header.resumed_step,
        max_steps=run.header.config.get("max_steps"),
        tokens_per_s=last.tokens_per_s if last and measured else None,
        checkpoint=newest[0].name if newest else None,
        reason=run.end.reason if run.end else None,
        seconds_since_step=age_s,
    )


def tuning_status(report_directory: Path) -> TuningStatus:
    """Return the progress of a tuning, from its trial log."""
    trials, corrupt = read_trial_records(report_directory / TRIAL_LOG_DIRECTORY)
    newest = trials[-1] if trials else None
    return TuningStatus(
        directory=str(report_directory),
        trials=len(trials),
        outcomes=dict(
            Counter(str(record.outcome.get("kind", "other")) for record in trials)
        ),
        newest_utc=newest.time_utc if newest else None,
        newest=newest.label if newest else None,
        corrupt_lines=corrupt,
    )


def find_runs_and_tunings(
    places: list[Path], runs: Path, reports: Path
) -> tuple[list[Path], list[Path]]:
    """Return directories of runs and of reports.

    They are the given ones, or else all that exist, newest first.
    """
    if places:
        tunings = [place for place in places if (place / TRIAL_LOG_DIRECTORY).is_dir()]
        return [place for place in places if place not in tunings], tunings
    newest_first = functools.partial(
        sorted, key=lambda path: path.stat().st_mtime, reverse=True
    )
    found_runs = newest_first(path for path in runs.glob("*") if path.is_dir())
    return found_runs, newest_first(
        path.parent for path in reports.glob(f"*/{TRIAL_LOG_DIRECTORY}")
    )


def _state(run: Run, queued: str | None, *, asked: bool) -> str:
    if queued is not None and queued != "PENDING":
        return queued.lower()
    if run.end is None:
        return (
            "running, or killed"
            if not asked or run.header.job.startswith("torchrun")
            else "killed"
        )
    ends = {
        0: "finished",
        REQUEUE: "saved, run again to resume",
        TrainingFailed.exit_code: "gave up",
    }
    waiting = ", requeued" if queued == "PENDING" else ""
    return (
        ends.get(run.end.exit_code, f"exited with code {run.end.exit_code}") + waiting
    )
