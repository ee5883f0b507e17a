"""Request for timed windows of training, with their time budget."""

from dataclasses import dataclass
from pathlib import Path

from autotune.base.defaults import TRIAL_TIMEOUT_S, WINDOW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Request for windows of training, with their time budget."""

    data: Path = Path()
    """Directory of the dataset; the working directory for code of yours, which knows
    its data."""
    reports: Path
    """Directory of reports, which has the trial logs."""
    budget_s: float
    """Time budget of all windows, including those from the trial log. When it is used
    up, the result may be undecided. The first three rounds may exceed it, but not
    ``budget_ends_s``."""
    local_ranks: int | None = None
    """Number of local ranks; None means as probed."""
    max_workers: int | None = None
    """Most DataLoader workers of a rank that may be tried; None means as many as CPUs
    and memory allow."""
    window_s: float = WINDOW_S
    """Least duration of a window."""
    replayed_step_s: float | None = None
    """Time of a micro-batch on the simulated GPU; None runs the training step."""
    sample_delay_s: float = 0.0
    """Delay added to the reading of each sample, which simulates slower storage."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    """Time after which a window is stopped as failed."""
    budget_ends_s: float | None = None
    """Deadline in seconds since 1970, after which no window is likely to end: a longer
    one does not start. None means that there is no deadline."""
    study_file: Path | None = None
    """File to which the phase writes its Optuna study; None for no file."""
