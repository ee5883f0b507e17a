"""Your own training code as a subject.

It has requests, figures and evidence of trials, and the profile that keeps them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.evidence.profile import Fingerprint, Provenance
from autotune.evidence.workers import CountEvidence, CountRow
from autotune.subjects.own.subject import Argument, OwnCode, Subject
from autotune.trials.job_figures import JobFigures, LoadedWindow
from autotune.trials.values import FinishedTrial, JobName, TrialRequest
from trainer.config.train_config import PROFILE_SCHEMA_VERSION
from trainer.formats.tables import StrictTable

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""
STEPS = 3
"""Optimizer steps of a trial: the first allocates the optimizer's state, two further
ones must agree."""


class OwnStepRequest(TrialRequest):
    """Request for optimizer steps of your own code under a memory budget."""

    job: ClassVar[JobName] = "own_step"

    step: str
    arguments: dict[str, Argument]
    """Arguments of ``step``, the searched size included."""
    source_sha256: str
    device: Literal["cpu", "cuda"]
    memory_budget_bytes: int | None
    """None means no limit."""
    steps: int
    attempt: int = 0
    """Number that makes a repeated trial another trial."""


class OwnTraceRequest(TrialRequest):
    """Request for traces of a model of yours, for several sizes."""

    job: ClassVar[JobName] = "own_trace"

    model: str
    """``module:build_model``, which returns a module and its batch."""
    arguments: dict[str, Argument]
    along: str
    device: Literal["cpu", "cuda"]
    directory: str
    sizes: list[int] = Field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.model


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
class OwnStepFigures(JobFigures):
    """Figures of an ``own_step`` job."""

    step_s: tuple[float, ...]
    peak_bytes: int
    """Peak use of the budget, as for the trainer's own steps."""
    non_pytorch_bytes: int | None
    step_peak_bytes: tuple[int, ...]
    """Highest memory within each step; on a CPU the growth of resident memory."""
    kept_bytes: tuple[int, ...]
    """Memory in use after each step."""
    optimizer_steps: int
    """Steps that torch's optimizers took; 0 if your code uses none of them."""
    trains: bool
    """True if one call takes many steps: a training loop."""
    gradient_bytes: int
    """Gradients that torch's optimizers hold after a step; 0 if there are none."""
    host_peak_bytes: int
    """Highest resident memory of the process."""
    imported: tuple[str, ...] = ()
    """Modules that your code imported within the trial; on a CPU they count as its
    memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoaderFigures(LoadedWindow):
    """Figures of an ``own_loader`` job: a timed window of steps, one batch each."""

    epoch_batches: int | None
    """Batches of an epoch, if one ended; None otherwise."""
    processes: int
    """Worker processes that the loader has started."""
    batch_bytes: int
    """Bytes of the tensors of a batch."""


class SizeRow(StrictTable):
    """A trial of one size."""

    size: PositiveInt
    fits: bool
    peak_bytes: PositiveInt | None = None
    step_s: PositiveFloat | None = None
    """Median time of the steps but the first; None if the size did not fit, or on a
    pretended GPU."""


class StepEvidence(StrictTable):
    """Result of a probe of your own step: the largest size that fits."""

    feasible_max: PositiveInt
    """Largest size that ran optimizer steps under the budget."""
    infeasible_min: PositiveInt | None = None
    """Smallest size that ran out of memory; None if the search reached its upper limit
    first."""
    feasible_peak_bytes: PositiveInt
    """Peak memory of ``feasible_max`` in its trials."""
    predicted_peak_bytes: PositiveInt | None = None
    """Peak of ``feasible_max`` predicted from smaller trials."""
    traced_max: NonNegativeInt | None = None
    """Largest size that a trace predicted before any trial; None without
    ``build_model`` in the step's module."""
    not_traced: str | None = None
    kept_bytes: NonNegativeInt
    """Memory in use between two steps of ``feasible_max``: weights, optimizer state,
    whatever your code keeps."""
    host_peak_bytes: NonNegativeInt
    """Highest resident memory of the trial's process."""
    optimizer_steps: NonNegativeInt
    """Steps of torch's optimizers in that trial; 0 if none of them is used."""
    trains: bool = False
    """True if the function is a training loop, which another loader cannot feed."""
    multiple_of: PositiveInt = 1
    varies_bytes: NonNegativeInt = 0
    """Difference between steps of one size, accepted with --allow-varying; 0 if steps
    agree."""
    rows: list[SizeRow]
    """Sizes in the order in which they were tried."""
    verified_in: Literal["fresh processes", "this process"] = "fresh processes"
    seconds: NonNegativeFloat
    choice: str
    """Reason for the chosen size."""


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

    step: StepEvidence | None = None
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
