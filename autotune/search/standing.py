"""How runs and tunings are doing, from their records alone: readable from any node that sees the files."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from autotune.core.trial import TrialRecord
from autotune.core.tuning import RunStanding, TuningStanding
from autotune.decide.physical import check_run
from autotune.errors import AutotuneError
from autotune.store import read_ledger
from trainer.checkpoint import CHECKPOINTS_DIRECTORY, list_checkpoints
from trainer.errors import TrainerError, TrainingFailed
from trainer.record import RUN_FILE, STEPS_FILE, Run, read_run
from trainer.watch import REQUEUE

Jobs = Mapping[str, tuple[str, str]]
"""Id and state by a job's name."""
LEDGER_DIRECTORY = "ledger"


def standing_of_run(directory: Path, jobs: Jobs | None, *, now_s: float | None = None) -> RunStanding:
    """How a run is doing; one that has not begun is told from its job.

    Args:
        directory: Of the run.
        jobs: This user's, where SLURM can be asked.
        now_s: The time, in seconds since 1970.
    """
    number, queued = (jobs or {}).get(f"train-{directory.name}", (None, None))
    if not (directory / RUN_FILE).is_file():
        return RunStanding(directory=str(directory), state="queued" if queued == "PENDING" else "not begun", job=number)
    try:
        run = read_run(directory)
    except TrainerError as error:
        return RunStanding(directory=str(directory), state="cannot be read", job=number, reason=error.message)
    last = run.steps[-1] if run.steps else None
    newest = list_checkpoints(directory / CHECKPOINTS_DIRECTORY)[:1]
    return RunStanding(
        directory=str(directory),
        state=_state(run, queued, asked=jobs is not None),
        job=number,
        step=last.step if last else run.header.resumed_step,
        max_steps=run.header.config.get("max_steps"),
        real_tokens_per_s=last.real_tokens_per_s if last and _is_measured(run) else None,
        checkpoint=newest[0].name if newest else None,
        reason=run.end.reason if run.end else None,
        seconds_since_step=_age_s(directory / STEPS_FILE, time.time() if now_s is None else now_s),
    )


def standing_of_tuning(report_directory: Path) -> TuningStanding:
    """What a tuning has measured so far."""
    content = read_ledger(report_directory / LEDGER_DIRECTORY)
    found = [TrialRecord.of(record) for record in content.records]
    trials = [record for record in found if record is not None]
    newest = trials[-1] if trials else None
    return TuningStanding(
        directory=str(report_directory),
        trials=len(trials),
        outcomes=dict(Counter(str(record.outcome.get("kind", "other")) for record in trials)),
        newest_utc=newest.time_utc if newest else None,
        newest=newest.label if newest else None,
        damaged_lines=content.damaged_lines + found.count(None),
    )


def find_standings(places: list[Path], runs: Path, reports: Path) -> tuple[list[Path], list[Path]]:
    """Directories of runs and of reports: those that are named, else all there are, newest first."""
    if places:
        tunings = [place for place in places if (place / LEDGER_DIRECTORY).is_dir()]
        return [place for place in places if place not in tunings], tunings
    found_runs = [path for path in runs.glob("*") if path.is_dir()]
    found_tunings = [path.parent for path in reports.glob(f"*/{LEDGER_DIRECTORY}")]
    return _newest_first(found_runs), _newest_first(found_tunings)


def _state(run: Run, queued: str | None, *, asked: bool) -> str:
    if queued is not None and queued != "PENDING":
        return queued.lower()
    if run.end is None:
        return "running, or killed" if not asked or run.header.job.startswith("torchrun") else "killed"
    waiting = ", queued again" if queued == "PENDING" else ""
    if run.end.exit_code == 0:
        return f"finished{waiting}"
    if run.end.exit_code == REQUEUE:
        return f"saved, goes on when started again{waiting}"
    if run.end.exit_code == TrainingFailed.exit_code:
        return f"gave up{waiting}"
    return f"ended with code {run.end.exit_code}{waiting}"


def _is_measured(run: Run) -> bool:
    """Whether its rates are those of a real GPU, or of a CPU."""
    try:
        check_run(run)
    except AutotuneError:
        return False
    return True


def _age_s(path: Path, now_s: float) -> float | None:
    try:
        return max(0.0, now_s - path.stat().st_mtime)
    except OSError:
        return None


def _newest_first(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
