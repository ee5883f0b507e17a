"""Your own training code as a subject.

It has requests, figures and evidence of trials, and the profile that keeps them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Fingerprint, Provenance
from autotune.evidence.workers import CountEvidence, CountRow
from autotune.subjects.own.subject import OwnCode, Subject
from autotune.subjects.subject import Argument
from autotune.trials.job_figures import LoadedWindow
from autotune.trials.values import FinishedTrial, JobName, TrialRequest
from trainer.config.train_config import PROFILE_SCHEMA_VERSION
from trainer.formats.tables import StrictTable

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


class LoaderRow(CountRow):
    """Results of windows of your own loader with one number of workers."""

    batches_per_s: list[PositiveFloat]
    processes: NonNegativeInt
    """Worker processes that were started."""


class LoaderEvidence(CountEvidence):
    """Sufficient number of workers of your own loader, with its evidence."""

    cached_batches_per_s: list[PositiveFloat]
    rows: list[LoaderRow]
    worker_bytes: PositiveInt | None = None
    """Private memory of the largest worker."""
    batch_bytes: NonNegativeInt
    epoch_batches: PositiveInt | None = None
    """Batches of an epoch, if one ended within a window, so that restarting the loader
    is part of its cost."""


class OwnConstraints(StrictTable):
    """Limits that the user set; None without a probe."""

    memory_budget_bytes: PositiveInt | None = None
    headroom_share: Annotated[float, Field(ge=0, lt=1)] = HEADROOM_SHARE


class OwnEvidence(StrictTable):
    """Measurements behind the profile; None if a command measured nothing."""

    step: ProbeEvidence | None = None
    loader: LoaderEvidence | None = None


class OwnProfile(StrictTable):
    """The profile of your own training code."""

    schema_version: Literal[2] = PROFILE_SCHEMA_VERSION
    subject: Subject
    tuned: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Values to use, by argument."""
    constraints: OwnConstraints
    fingerprint: Fingerprint
    """Its ``model_sha256`` is that of the functions, arguments and source; it has no
    dataset."""
    provenance: Provenance
    evidence: OwnEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A written profile of your own code, its path, and the command's trials."""

    path: Path
    profile: OwnProfile
    trials: tuple[FinishedTrial, ...] = ()


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
