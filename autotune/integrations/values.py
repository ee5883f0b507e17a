"""Your own training code as a subject.

It has requests and figures of trials.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.subjects.own.subject import OwnCode
from autotune.subjects.subject import Argument
from autotune.trials.job_figures import LoadedWindow
from autotune.trials.values import JobName, TrialRequest

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""


class OwnLoaderRequest(TrialRequest):
    """Request for a timed window of your own loader.

    Its batches are consumed by your own step, or by one of a given duration.
    """

    job: ClassVar[JobName] = "own_loader"

    loader: str
    step: str | None
    """None replays a step of ``step_time_s``."""
    arguments: dict[str, Argument]
    source_sha256: str
    device: Literal["cpu", "cuda"]
    num_workers: int
    cached: bool
    """True if batches are cached, which gives the upper bound without data loading."""
    round: int
    interleaved_with: list[str]
    window_s: float
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoaderFigures(LoadedWindow):
    """Figures of an ``own_loader`` job: a timed window of steps, one batch each."""

    epoch_batches: int | None
    """Batches of an epoch, if one ended; None otherwise."""
    processes: int
    """Worker processes that the loader has started."""
    batch_bytes: int
    """Bytes of the tensors of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """Request to find the largest size of a step of yours.

    A field that is None takes the default of the machine.
    """

    code: OwnCode
    reports: Path
    memory_bytes: int | None = None
    headroom_share: float = HEADROOM_SHARE
    max_size: int = MAX_SIZE
    multiple_of: int = 1
    allow_varying: bool = False
    starts_at_most: bool = False
    """True if ``max_size`` is tried first, because it is likely to fit."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    ranks: int | None = None
    """Ranks of this node that take the steps together; None for one."""
    measures_throughput: bool = True
    """False to search for the largest size alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSweep:
    """Request to find the fewest workers of a loader of yours."""

    code: OwnCode
    reports: Path
    step_time_s: float | None = None
    """Duration of a replayed step; None runs ``code.step``."""
    budget_s: float = 600.0
    ends_s: float | None = None
    """Deadline as Unix time: no window starts that is likely to end later."""
    window_s: float = WINDOW_S
    max_workers: int | None = None
    trial_timeout_s: float = TRIAL_TIMEOUT_S
