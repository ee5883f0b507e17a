"""State of runs and tunings from their records alone.

It is available on any node that sees the files.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """Last logged step; None if the run has no record."""
    max_steps: int | None = None
    tokens_per_s: float | None = None
    """Throughput of the last logged step; None if there is none, or if the GPU is a
    simulated one."""
    checkpoint: str | None = None
    """Name of the newest checkpoint; None if there is none."""
    reason: str | None = None
    """Why the run ended, or why its record cannot be read."""
    seconds_since_step: float | None = None
    """Time since the log of steps was written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """State of a tuning, from its trial log."""

    directory: str
    trials: int
    outcomes: Mapping[str, int]
    """Number of trials of each outcome."""
    newest_utc: str | None
    """Time of the newest trial."""
    newest: str | None
    """Label of the newest trial; None if there are no trials."""
    corrupt_lines: int
    """Number of corrupt lines of the trial log."""


def run_status(directory: Path, jobs: Jobs | None) -> RunStatus:
    """Return the state of a run.

    A run that has not begun has the state of its job, if SLURM can be queried.

    Args:
        directory: Directory of the run.
        jobs: Jobs in SLURM's queue; None if SLURM cannot be queried.
    """
    job_id, job_state = (jobs or {}).get(f"train-{directory.name}", (None, None))
    if not (directory / RUN_FILE).is_file():
        return RunStatus(
            directory=str(directory),
            state="queued" if job_state == "PENDING" else "not started",
            job=job_id,
        )
    try:
        run = read_run(directory)
    except TrainerError as error:
        return RunStatus(
            directory=str(directory),
            state="unreadable",
            job=job_id,
            reason=error.message,
        )
    step = run.header.resumed_step
    tokens_per_s = None
    if run.steps:
        step = run.steps[-1].step
        if _has_rates(run):
            tokens_per_s = run.steps[-1].tokens_per_s
    checkpoints = list_checkpoints(directory / CHECKPOINTS_DIRECTORY)
    seconds_since_step = None
    with contextlib.suppress(OSError):
        written_s = (directory / STEPS_FILE).stat().st_mtime
        seconds_since_step = max(0.0, time.time() - written_s)
    return RunStatus(
        directory=str(directory),
        state=_state(run, job_state, has_queue=jobs is not None),
        job=job_id,
        step=step,
        max_steps=run.header.config.get("max_steps"),
        tokens_per_s=tokens_per_s,
        checkpoint=checkpoints[0].name if checkpoints else None,
        reason=None if run.end is None else run.end.reason,
        seconds_since_step=seconds_since_step,
    )


def _has_rates(run: Run) -> bool:
    """Return False if the run is of a simulated GPU, which takes no time."""
    try:
        check_run(run)
    except AutotuneError:
        return False
    return True


def tuning_status(report_directory: Path) -> TuningStatus:
    """Return the progress of a tuning, from its trial log."""
    records, corrupt_lines = read_trial_records(report_directory / TRIAL_LOG_DIRECTORY)
    outcomes = Counter(str(record.outcome.get("kind", "other")) for record in records)
    newest = records[-1] if records else None
    return TuningStatus(
        directory=str(report_directory),
        trials=len(records),
        outcomes=dict(outcomes),
        newest_utc=None if newest is None else newest.time_utc,
        newest=None if newest is None else newest.label,
        corrupt_lines=corrupt_lines,
    )


def find_runs_and_tunings(
    directories: Sequence[Path], runs: Path, reports: Path
) -> tuple[list[Path], list[Path]]:
    """Return directories of runs and of reports.

    Args:
        directories: Directories of either kind; if there are none, all that exist are
            returned, newest first.
        runs: Directory of runs.
        reports: Directory of reports.
    """
    if directories:
        run_directories = []
        report_directories = []
        for directory in directories:
            if (directory / TRIAL_LOG_DIRECTORY).is_dir():
                report_directories.append(directory)
            else:
                run_directories.append(directory)
        return run_directories, report_directories
    trial_logs = reports.glob(f"*/{TRIAL_LOG_DIRECTORY}")
    return (
        _newest_first(path for path in runs.glob("*") if path.is_dir()),
        _newest_first(trial_log.parent for trial_log in trial_logs),
    )


def _newest_first(directories: Iterable[Path]) -> list[Path]:
    return sorted(directories, key=lambda path: path.stat().st_mtime, reverse=True)


def _state(run: Run, job_state: str | None, *, has_queue: bool) -> str:
    """Return the state of a run that has begun, in words.

    Args:
        run: Record of the run.
        job_state: State of its job in SLURM; None if no job is queued for it.
        has_queue: True if SLURM could be queried.
    """
    if job_state is not None and job_state != "PENDING":
        return job_state.lower()
    if run.end is None:
        # A run outside SLURM, or one whose queue cannot be read, may be alive.
        is_in_slurm = not run.header.job.startswith("torchrun")
        return "killed" if has_queue and is_in_slurm else "running, or killed"
    words = {
        0: "finished",
        REQUEUE: "saved, run again to resume",
        TrainingFailed.exit_code: "gave up",
    }
    state = words.get(run.end.exit_code, f"exited with code {run.end.exit_code}")
    return f"{state}, requeued" if job_state == "PENDING" else state
