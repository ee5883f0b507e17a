"""A trial: the request, its key, its outcome and its figures. Trials with equal keys measure the same."""

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
    """The job did what it was asked to, and these are its figures."""

    figures: dict[str, Any]
    kind: Literal["measured"] = field(default="measured", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(_Failure):
    """The allocator refused: the only outcome that says that something does not fit."""

    kind: Literal["out_of_memory"] = field(default="out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory(_Failure):
    """The kernel killed the job for the host's memory; says nothing about the budget."""

    kind: Literal["host_out_of_memory"] = field(default="host_out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(_Failure):
    """The job did not end in its time and was killed."""

    kind: Literal["timed_out"] = field(default="timed_out", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(_Failure):
    """The job failed in any other way."""

    kind: Literal["crashed"] = field(default="crashed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contaminated(_Failure):
    """Somebody else used the device, or the hardware slowed down: the figures are void."""

    kind: Literal["contaminated"] = field(default="contaminated", init=False)


Outcome = Measured | OutOfMemory | HostOutOfMemory | TimedOut | Crashed | Contaminated


_KINDS = {kind.__dataclass_fields__["kind"].default: kind for kind in get_args(Outcome)}


_WORDS = {"measured": "ran", "host_out_of_memory": "killed by the system"}


def outcome_from_json(value: dict[str, Any]) -> Outcome:
    """Read what ``dataclasses.asdict`` made of an outcome, as the trial log keeps it.

    Raises:
        ValueError: If the kind is unknown or its field is missing.
    """
    kind = value.get("kind")
    name, of = ("figures", dict) if kind == "measured" else ("detail", str)
    if kind in _KINDS and isinstance(value.get(name), of):
        found: Outcome = _KINDS[kind](**{name: value[name]})
        return found
    raise ValueError(f"not an outcome: {value!r}")


def describe(outcome: Outcome) -> str:
    """An outcome in a few words, for tables and progress."""
    return _WORDS.get(outcome.kind, outcome.kind.replace("_", " "))


FEWEST_TIMED_STEPS = 3
"""Fewer timed steps than this ask whether a size fits, and nothing about speed."""

Share = Annotated[float, Field(ge=0, le=1)]
JobName = Literal["step", "feed", "trace", "links", "gradient_sync"]
JOB_MODULES: Mapping[str, str] = {
    "step": "autotune.memory.jobs.step",
    "feed": "autotune.workers.job",
    "trace": "autotune.memory.jobs.trace",
    "links": "autotune.network.jobs.links",
    "gradient_sync": "autotune.network.jobs.gradient_sync",
}
"""The module of each job, whose ``run`` a trial's child process calls; only there is it imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job for one child process."""

    job: JobName
    measured: dict[str, Any]
    """Everything that defines the measurement, as JSON; the key is taken over it."""
    timeout_s: float
    place: dict[str, Any] = field(default_factory=dict)
    """Where inputs lie on this machine; the same measurement elsewhere has the same key."""

    @property
    def key(self) -> str:
        """SHA-256 of what is measured."""
        return canonical_sha256({"job": self.job, "measured": self.measured})

    @property
    def identity(self) -> dict[str, Any]:
        """What a trial log tells it by."""
        return {"key": self.key, "job": self.job, "measured": self.measured}

    @property
    def config(self) -> dict[str, Any]:
        """The trainer's settings in it, which another version of this project may have written; empty without any."""
        config = self.measured.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def ranks(self) -> int:
        """Ranks that it keeps busy; one where it does not say."""
        counts = [self.measured.get(name) for name in ("local_ranks", "nodes", "ranks_per_node")]
        return math.prod(count for count in counts if isinstance(count, int) and count > 0)

    @property
    def is_timed(self) -> bool:
        """Whether its answer depends on how fast the device is."""
        steps = self.measured.get("timed_steps")
        return self.job != "step" or not isinstance(steps, int) or steps >= FEWEST_TIMED_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial with what became of it."""

    trial: Trial
    outcome: Outcome
    seconds: float
    label: str
    from_trial_log: bool


class MadeOn(StrictTable):
    """What a trial ran on and was of, as its profile's fingerprint says it."""

    gpu_name: str | None = None
    driver: str | None = None
    gpu_count: Annotated[int, Field(ge=0)] = 0
    cpu_model: str | None = None
    allotted_cpus: Annotated[int, Field(gt=0)]
    torch: str
    model_sha256: str
    dataset_hash: str

    @property
    def machine(self) -> str:
        """The device, in words."""
        return f"{self.gpu_count} x {self.gpu_name}" if self.gpu_name else self.cpu_model or "cpu"

    @property
    def processors(self) -> str:
        """Those of the host, in words."""
        return f"{self.allotted_cpus} of {self.cpu_model or 'n/a'}"


class TrialRecord(StrictTable):
    """A trial as the trial log keeps it."""

    time_utc: str
    site: str
    """Where it was measured: machine, software, model and dataset, as a hash."""
    key: str
    job: JobName
    measured: dict[str, Any]
    label: str
    outcome: dict[str, Any]
    seconds: Annotated[float, Field(ge=0)]
    made_on: MadeOn | None = None
    """None in trial logs from before it was kept: there ``site`` alone tells machines apart, and does not say which."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "TrialRecord | None":
        """Read a record; None if it is no trial of this version of the project."""
        try:
            found = parse_table(cls, record, where="trial_log")
            outcome = outcome_from_json(found.outcome)
            if isinstance(outcome, Measured) and found.job in _FIGURES:
                _FIGURES[found.job].of(outcome)
        except (BadConfig, ValueError, KeyError, TypeError):
            return None
        return found

    @property
    def trial(self) -> Trial:
        """What was measured."""
        return Trial(job=self.job, measured=self.measured, timeout_s=0.0)

    def finished(self) -> FinishedTrial:
        """The trial and what became of it."""
        return FinishedTrial(
            trial=self.trial,
            outcome=outcome_from_json(self.outcome),
            seconds=self.seconds,
            label=self.label,
            from_trial_log=True,
        )


class _Measured:
    """Figures that a job's child process gives as JSON."""

    __slots__ = ()

    @classmethod
    def of(cls, outcome: Measured) -> Self:
        """Read the figures of a measured trial; unknown ones are left out.

        Raises:
            ValueError: If one is missing or of another kind.
        """
        found: Self = _reader(cls).validate_python(outcome.figures)  # type: ignore[arg-type]  # classes are hashable
        return found


@functools.cache
def _reader(kind: type[Any]) -> "TypeAdapter[Any]":
    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures(_Measured):
    """Figures of a ``step`` job: optimizer steps on random full rows."""

    optimizer_steps: int
    """Steps that really ran, warm-up included."""
    step_s: tuple[float, ...]
    padded_tokens_per_step: int
    peak_bytes: int
    """Highest use of the budget: on CUDA the allocator's reserve and what lies outside it; on a CPU the growth of the
    process since before the model was built."""
    non_pytorch_bytes: int | None
    """Device memory that the allocator does not count (context, workspaces); None on a CPU."""
    loss: float
    model_flops_per_step: float | None = None
    """Of all ranks, what the mathematics asks for; None in trial logs from before it was counted."""
    local_ranks: int = 1
    """Ranks that took the steps together; the figures are the job's: all ranks' tokens, the slowest rank's seconds, and
    the most that any rank used."""


class GpuUse(StrictTable):
    """What GPUs did in a window of training, or in several: means, shares from 0 to 1; None where nothing tells."""

    utilisation_share: Share | None = None
    """Time with a kernel running, by NVML; this is not MFU."""
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    """Median of a window's samples."""
    power_capped_share: Share | None = None
    """Samples at the power cap: how a loaded GPU operates, not a fault."""
    gpm_sm_share: Share | None = None
    """Time, over SMs, with a warp resident; by GPM, as those below."""
    gpm_occupancy_share: Share | None = None
    """Resident warps of as many as there is room for."""
    gpm_tensor_share: Share | None = None
    """Time in which Tensor Cores worked."""
    gpm_dram_share: Share | None = None
    """Of the memory's bandwidth."""
    gpm_pcie_rx_bytes_per_s: float | None = None
    """From the host."""


class GpuUseFigures(GpuUse):
    """One GPU over one window."""

    model_config = ConfigDict(strict=False, extra="ignore")

    samples: int = 0
    used_bytes: int | None = None
    temperature_c: int | None = None
    lacking: str | None = None
    """Why there is no utilisation."""
    gpm_windows: int = 0
    gpm_lacking: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFigures(_Measured):
    """Figures of a ``feed`` job: a window of optimizer steps on the dataset's own rows, of all local ranks together."""

    optimizer_steps: int
    """Steps that really ran, discarded ones included."""
    discarded_batches: int
    """Taken before the window: what the queues held ready, twice over, and warm-up."""
    steps: int
    tokens_per_s: float
    padded_tokens_per_s: float
    data_wait_share: float
    """Part of the window's time in which devices had nothing to do but wait for data, all ranks' added up, 0 to 1: what
    data costs at most, as a rank that waits holds up the others."""
    window_start_s: float
    """CLOCK_MONOTONIC, so that another process can cut its own samples to the window."""
    window_end_s: float
    local_ranks: int
    gradient_accumulation_steps: int
    memory_bytes: int | None
    """Of the ranks and their loader workers, shared pages counted in parts; None where it cannot be read."""
    worker_bytes: int | None
    """What the largest loader worker has for itself; None where there is none."""
    storage_bytes_per_s: float | None
    """What the kernel read from storage for them; None where it does not count."""
    model_flops_per_s: float | None = None
    """Of all ranks, what the mathematics of the real tokens asks for; None where the step was replayed."""
    gpus: tuple[GpuUseFigures, ...] = ()
    """What each GPU did in the window; empty without one."""
    losses: tuple[float, ...] = ()
    """Of each step, warm-up included, where they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures(_Measured):
    """Figures of a ``links`` job: what messages between ranks took."""

    all: tuple[tuple[int, float], ...]
    """Bytes and seconds of all-reduces over all ranks; here as below those of the slowest rank."""
    within: tuple[tuple[int, float], ...]
    """The same within every node at once; empty where nodes have one rank."""
    between: tuple[tuple[int, float], ...]
    """The same over the first ranks of all nodes; empty where there is one node."""
    neighbours_bytes_per_s: tuple[float, ...]
    """Each way, of each node with the next, the last one with the first."""
    matmul_flops_per_s: tuple[float, ...]
    """Of each rank while all multiply: bf16 on GPUs, fp32 on CPUs."""
    nodes: int
    ranks_per_node: int
    backend: str
    """Of torch.distributed, for tensors on the device."""
    transport: str
    """What carries messages between nodes, or why that is not known."""
    interface: str | None
    """Of the first node."""
    interface_bytes_per_s: int | None
    """What it says of itself; None where it says nothing."""
    slowdown_share: float = 0.0
    """What computing loses while messages travel, as part of that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSyncFigures(_Measured):
    """Figures of a ``gradient_sync`` job: optimizer steps of all ranks on the dataset's rows, from memory."""

    step_s: tuple[float, ...]
    """Of each step, of the slowest rank."""
    optimizer_step_s: float
    communication_s: float | None
    """Median wait for gradients after the last ones had left; None where nobody can tell."""
    compute_s_by_rank: tuple[tuple[float, ...], ...]
    """Forward and backward of each step, without waiting for other ranks; empty where nobody can tell."""
    forward_share: float | None
    gradients: tuple[tuple[int, float], ...]
    """Elements of each gradient, and after which part of backward it was there, in that order."""
    gradient_accumulation_steps: int
    micro_batch_size: int
    tokens_per_step: float
    """Of all ranks."""
    peak_bytes: int | None
    """Highest growth of a rank's memory; None where it cannot be told."""
    losses: tuple[float, ...]


_FIGURES: dict[str, type[_Measured]] = {
    "step": StepFigures, "feed": FeedFigures, "links": LinkFigures, "gradient_sync": GradientSyncFigures,
}  # fmt: skip


class TrialRequest(StrictTable):
    """Everything that defines a measurement."""

    job: ClassVar[JobName]

    def trial(self, *, timeout_s: float, **place: Any) -> Trial:  # noqa: ANN401 - JSON
        """Return the trial of this request, whose inputs lie at ``place``."""
        # Fields with a default came later; leaving defaults out keeps the keys of trials in older trial logs.
        fields = type(self).model_fields.items()
        defaults = {name for name, field in fields if not field.is_required() and getattr(self, name) == field.default}
        measured = self.model_dump(mode="json", exclude=defaults)
        return Trial(job=self.job, measured=measured, timeout_s=timeout_s, place=place)

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Self:
        """Read ``Trial.measured``.

        Raises:
            BadConfig: If a field is missing, unknown or of another type, or settings contradict each other.
        """
        return parse_table(cls, measured, where="trial")
