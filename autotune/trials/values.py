"""A trial: the request, its key, its outcome and its figures.

Trials with equal keys measure the same. A ``TrialRequest`` of a job makes a ``Trial``;
a machine runs it to an ``Outcome``; if that is ``Measured``, the ``JobFigures`` of the
job read its figures. ``TrialRecord`` is all of this in the trial log.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import ConfigDict, Field, TypeAdapter

from trainer.config.tables import StrictTable, canonical_sha256, parse_table
from trainer.errors import BadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The job completed, and these are its figures."""

    figures: dict[str, Any]
    kind: Literal["measured"] = field(default="measured", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(_Failure):
    """The allocator ran out of memory.

    No other outcome shows that a size does not fit.
    """

    kind: Literal["out_of_memory"] = field(default="out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory(_Failure):
    """The kernel killed the job because the host ran out of memory.

    This says nothing about the budget.
    """

    kind: Literal["host_out_of_memory"] = field(
        default="host_out_of_memory", init=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(_Failure):
    """The job exceeded its time limit and was killed."""

    kind: Literal["timed_out"] = field(default="timed_out", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(_Failure):
    """The job failed in any other way."""

    kind: Literal["crashed"] = field(default="crashed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contaminated(_Failure):
    """Another process used the device, or the hardware slowed down.

    The figures are discarded.
    """

    kind: Literal["contaminated"] = field(default="contaminated", init=False)


Outcome = Measured | OutOfMemory | HostOutOfMemory | TimedOut | Crashed | Contaminated
_KINDS = {kind.__dataclass_fields__["kind"].default: kind for kind in get_args(Outcome)}
"""Class of each kind of outcome."""
_WORDS = {"measured": "completed", "host_out_of_memory": "killed: host out of memory"}


def outcome_from_json(value: dict[str, Any]) -> Outcome:
    """Read ``dataclasses.asdict`` of an outcome.

    Raises:
        ValueError: If its kind is unknown or a field is missing.
    """
    kind = value.get("kind")
    figures = value.get("figures")
    detail = value.get("detail")
    if kind == "measured" and isinstance(figures, dict):
        return Measured(figures=figures)
    if kind != "measured" and kind in _KINDS and isinstance(detail, str):
        outcome: Outcome = _KINDS[kind](detail=detail)
        return outcome
    raise ValueError(f"not an outcome: {value!r}")


def describe(outcome: Outcome) -> str:
    """Return an outcome in a few words, for tables and progress."""
    return _WORDS.get(outcome.kind, outcome.kind.replace("_", " "))


FEWEST_TIMED_STEPS = 3
"""Fewest timed steps of a trial that measures throughput; with fewer it only tests if a
size fits."""

Share = Annotated[float, Field(ge=0, le=1)]
JobName = Literal[
    "step",
    "training",
    "trace",
    "links",
    "gradient_sync",
    "rates",
    "own_step",
    "own_loader",
    "own_trace",
]
JOB_MODULES: Mapping[str, str] = {
    "step": "autotune.memory.jobs.step",
    "training": "autotune.workers.job",
    "trace": "autotune.memory.jobs.trace",
    "links": "autotune.network.jobs.links",
    "gradient_sync": "autotune.network.jobs.gradient_sync",
    "rates": "autotune.speed.jobs.measure_rates",
    "own_step": "autotune.integrations.jobs.step",
    "own_loader": "autotune.integrations.jobs.loader",
    "own_trace": "autotune.integrations.jobs.trace",
}
"""Module of each job; only a trial's child process imports it, to call its ``run``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A job for child processes, one per rank."""

    job: JobName
    measured: dict[str, Any]
    """Everything that defines the measurement, as JSON; the key is its hash."""
    timeout_s: float
    local: dict[str, Any] = field(default_factory=dict)
    """Inputs that depend on this machine, such as paths; they do not change the key."""

    @property
    def key(self) -> str:
        """SHA-256 of the job and ``measured``."""
        return canonical_sha256({"job": self.job, "measured": self.measured})

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the trainer, perhaps written by another version of the project.

        Empty if the trial has none.
        """
        config = self.measured.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def ranks(self) -> int:
        """Number of ranks that it keeps busy; one if it names none."""
        factors = [
            self.measured.get(name)
            for name in ("local_ranks", "nodes", "ranks_per_node")
        ]
        return math.prod(
            factor for factor in factors if isinstance(factor, int) and factor > 0
        )

    @property
    def is_timed(self) -> bool:
        """True if the result depends on the speed of the device."""
        if self.job == "own_step":
            return False
        timed_steps = self.measured.get("timed_steps")
        if self.job == "step" and isinstance(timed_steps, int):
            return timed_steps >= FEWEST_TIMED_STEPS
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial with its outcome."""

    trial: Trial
    outcome: Outcome
    seconds: float
    label: str
    from_trial_log: bool
    made_on: "MadeOn | None" = None
    """Origin of the trial; None if it is not known."""


class MadeOn(StrictTable):
    """Machine, software, model and dataset of a trial.

    All but the load average are as in the fingerprint of its profile.
    """

    gpu_name: str | None = None
    driver: str | None = None
    gpu_count: Annotated[int, Field(ge=0)] = 0
    cpu_model: str | None = None
    allotted_cpus: Annotated[int, Field(gt=0)]
    torch: str
    model_sha256: str
    dataset_hash: str
    load_average_1min: Annotated[float, Field(ge=0)] | None = None
    """Load average when the command began, before its own trials; None if it is not
    known."""

    @property
    def machine(self) -> str:
        """The device, in words."""
        if self.gpu_name:
            return f"{self.gpu_count} x {self.gpu_name}"
        return self.cpu_model or "cpu"

    @property
    def processors(self) -> str:
        """Processors of the host, in words."""
        return f"{self.allotted_cpus} of {self.cpu_model or 'n/a'}"


class TrialRecord(StrictTable):
    """A trial as the trial log keeps it."""

    time_utc: str
    site: str
    """Hash of the machine, software, model and dataset of the measurement."""
    key: str
    job: JobName
    measured: dict[str, Any]
    label: str
    outcome: dict[str, Any]
    seconds: Annotated[float, Field(ge=0)]
    made_on: MadeOn | None = None
    """Origin of the trial; None in older trial logs, whose ``site`` distinguishes
    machines without naming them."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "TrialRecord | None":
        """Read a record.

        Return None if it is no trial of this version of the project.
        """
        try:
            trial_record = parse_table(cls, record, where="trial_log")
            outcome = outcome_from_json(trial_record.outcome)
            if isinstance(outcome, Measured) and trial_record.job in _FIGURES:
                _FIGURES[trial_record.job].of(outcome)
        except (BadConfig, ValueError, KeyError, TypeError):
            return None
        return trial_record

    @property
    def trial(self) -> Trial:
        """The trial that was measured."""
        return Trial(job=self.job, measured=self.measured, timeout_s=0.0)

    def finished(self) -> FinishedTrial:
        """Return the trial with its outcome."""
        return FinishedTrial(
            trial=self.trial,
            outcome=outcome_from_json(self.outcome),
            seconds=self.seconds,
            label=self.label,
            from_trial_log=True,
            made_on=self.made_on,
        )


class JobFigures:
    """Figures that a job's child process returns as JSON."""

    __slots__ = ()

    @classmethod
    def of(cls, outcome: Measured) -> Self:
        """Read a trial's figures; unknown ones are left out.

        Raises:
            ValueError: If one is missing or of another type.
        """
        figures: Self = _adapter(cls).validate_python(outcome.figures)  # type: ignore[arg-type]  # classes are hashable
        return figures


# Building an adapter takes much longer than reading with it.
_adapter = functools.cache(TypeAdapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures(JobFigures):
    """Figures of a ``step`` job: optimizer steps on random full sequences."""

    optimizer_steps: int
    """Steps that ran, warm-up included."""
    step_s: tuple[float, ...]
    padded_tokens_per_step: int
    peak_bytes: int
    """Peak use of the budget: on CUDA the allocator's reserve and non-PyTorch memory;
    on a CPU the growth of the process since before the model was built."""
    non_pytorch_bytes: int | None
    """Non-PyTorch memory of the device (context, workspaces); None on a CPU."""
    loss: float
    model_flops_per_step: float | None = None
    """Model FLOPs of a step on all ranks; None in trial logs from before they were
    counted."""
    local_ranks: int = 1
    """Ranks that took the steps together; the figures are the job's: all ranks' tokens,
    the slowest rank's seconds, and the highest memory of any rank."""


class GpuUse(StrictTable):
    """Activity of GPUs in one or several windows of training.

    Figures are means, shares from 0 to 1; None if not reported.
    """

    utilisation_share: Share | None = None
    """Share of the time with a kernel running, by NVML; this is not MFU."""
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    """Median SM clock of a window's samples."""
    power_capped_share: Share | None = None
    """Share of samples at the power cap, which is normal for a loaded GPU and not a
    fault."""
    gpm_sm_share: Share | None = None
    """Share of the time, over SMs, with a warp resident; by GPM, as the fields
    below."""
    gpm_occupancy_share: Share | None = None
    """Resident warps as a share of the most that fit."""
    gpm_tensor_share: Share | None = None
    """Share of the time in which Tensor Cores worked."""
    gpm_dram_share: Share | None = None
    """Share of the memory bandwidth in use."""
    gpm_pcie_rx_bytes_per_s: float | None = None
    """PCIe traffic from the host."""


class GpuUseFigures(GpuUse):
    """Activity of one GPU over one window."""

    model_config = ConfigDict(strict=False, extra="ignore")

    samples: int = 0
    used_bytes: int | None = None
    temperature_c: int | None = None
    lacking: str | None = None
    gpm_windows: int = 0
    gpm_lacking: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWindow(JobFigures):
    """Figures of a timed window of steps that a loader feeds."""

    steps: int
    tokens_per_s: float
    """Non-padding tokens per second; batches per second of a loader of your own."""
    data_wait_share: float
    """Share of the window in which devices had nothing to do but wait for data, summed
    over ranks, 0 to 1: an upper bound on the cost of data loading, as a rank that waits
    delays the others."""
    window_start_s: float
    """Start of the window by CLOCK_MONOTONIC, so that another process can cut its own
    samples to the window."""
    window_end_s: float
    memory_bytes: int | None
    """Memory of the ranks and their DataLoader workers, shared pages counted in parts;
    None if it cannot be read."""
    worker_bytes: int | None
    """Private memory of the largest DataLoader worker; None without workers."""
    storage_bytes_per_s: float | None
    """Rate at which the kernel read from storage for them; None if it does not
    count."""
    gpus: tuple[GpuUseFigures, ...] = ()
    """Activity of each GPU in the window; empty without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFigures(LoadedWindow):
    """Figures of a ``training`` job.

    They are of a timed window of optimizer steps on the dataset, over all local ranks.
    """

    optimizer_steps: int
    """Steps that ran, discarded ones included."""
    discarded_batches: int
    """Batches taken before the window: those that the queues held ready, up to twice
    over, and warm-up."""
    padded_tokens_per_s: float
    local_ranks: int
    gradient_accumulation_steps: int
    model_flops_per_s: float | None = None
    """Model FLOP/s of all ranks for non-padding tokens; None if the step was
    replayed."""
    losses: tuple[float, ...] = ()
    """Loss of each step, warm-up included, if requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures(JobFigures):
    """Figures of a ``links`` job: times of messages between ranks."""

    all: tuple[tuple[int, float], ...]
    """Bytes and seconds of all-reduces over all ranks; the slowest rank's seconds, as
    in the fields below."""
    within: tuple[tuple[int, float], ...]
    """Bytes and seconds of all-reduces within every node at once; empty if nodes have
    one rank."""
    between: tuple[tuple[int, float], ...]
    """Bytes and seconds of all-reduces over the first ranks of all nodes; empty for one
    node."""
    neighbours_bytes_per_s: tuple[float, ...]
    """Bandwidth in each direction between each node and the next, the last one with the
    first."""
    matmul_flops_per_s: tuple[float, ...]
    """Matmul FLOP/s of each rank while all multiply: bf16 on GPUs, fp32 on CPUs."""
    nodes: int
    ranks_per_node: int
    backend: str
    """Backend of torch.distributed for tensors on the device."""
    transport: str
    """Transport of messages between nodes, or the reason that it is not known."""
    interface: str | None
    """Network interface of the first node."""
    interface_bytes_per_s: int | None
    """Bandwidth that the interface reports; None if it reports none."""
    slowdown_share: float = 0.0
    """Share of compute that is lost during communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSyncFigures(JobFigures):
    """Figures of a ``gradient_sync`` job.

    They are of optimizer steps of all ranks on cached batches of the dataset.
    """

    step_s: tuple[float, ...]
    """Time of each step on its slowest rank."""
    optimizer_step_s: float
    communication_s: float | None
    """Median wait for gradients after the last ones were sent; None if it cannot be
    measured."""
    compute_s_by_rank: tuple[tuple[float, ...], ...]
    """Time of forward and backward of each step, without waiting for other ranks; empty
    if it cannot be measured."""
    forward_share: float | None
    gradients: tuple[tuple[int, float], ...]
    """Elements of each gradient, and the share of backward after which it was ready, in
    that order."""
    gradient_accumulation_steps: int
    micro_batch_size: int
    tokens_per_step: float
    """Non-padding tokens of a step on all ranks."""
    peak_bytes: int | None
    """Highest growth of a rank's memory; None if it cannot be measured."""
    losses: tuple[float, ...]


_FIGURES: dict[str, type[JobFigures]] = {
    "step": StepFigures,
    "training": TrainingFigures,
    "links": LinkFigures,
    "gradient_sync": GradientSyncFigures,
}


class TrialRequest(StrictTable):
    """Everything that defines a measurement."""

    job: ClassVar[JobName]

    def trial(self, *, timeout_s: float, **local: Any) -> Trial:
        """Return the trial of this request.

        Args:
            timeout_s: Time limit of the trial.
            local: Inputs that depend on this machine.
        """
        # Fields with a default came later; leaving defaults out keeps the keys of
        # trials in older trial logs.
        unchanged = {
            name
            for name, info in type(self).model_fields.items()
            if not info.is_required() and getattr(self, name) == info.default
        }
        measured = self.model_dump(mode="json", exclude=unchanged)
        return Trial(job=self.job, measured=measured, timeout_s=timeout_s, local=local)

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Self:
        """Read ``Trial.measured``.

        Raises:
            BadConfig: If a field is invalid, or settings contradict each other.
        """
        return parse_table(cls, measured, where="trial")
