"""What ``autotune launch … --json`` answers, and any command that submits itself with ``--slurm --json``."""

from dataclasses import dataclass

from autotune.core.standing import RunStanding, TuningStanding


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedAnswer:
    """``launch slurm``: a training as a SLURM job."""

    jobs: list[str]
    """Ids, in the order in which they run; empty where nothing was submitted."""
    run: str
    """Directory of the run."""
    script: str
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusAnswer:
    """``launch status``: how runs and tunings are doing."""

    slurm_asked: bool
    """Whether SLURM could be asked for this user's jobs."""
    runs: tuple[RunStanding, ...]
    """Newest first."""
    tunings: tuple[TuningStanding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A SLURM job that a command submitted in its own place."""

    job: str
    """Its id."""
    expected_minutes: float | None
    """Null where nobody can tell."""
    time_limit: str
    """As SLURM writes it."""
    ledger: str | None
    """Where its results are collected; null where that is not known before it runs."""
    log: str
    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedAnswer(SubmittedJob):
    """With ``--slurm``: the job, and what follows."""

    then: tuple[SubmittedJob, ...]
    """Jobs that begin once this one has succeeded."""
    exit_code: int | None
    """Of the jobs; null without ``--wait``."""
