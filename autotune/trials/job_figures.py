"""Figures of jobs, as their child processes return them. Pure.

``Measured.figures`` are a dictionary from JSON. Each job has a subclass of
``JobFigures``, whose fields are the keys of that dictionary.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from pydantic import ConfigDict, TypeAdapter

from autotune.evidence.argument import Argument
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.kernels import KernelTime, Roofline
from autotune.evidence.peak_contents import PeakContents
from autotune.trials.outcomes import Measured


class JobFigures:
    """Base of the figures of each job; subclasses are dataclasses."""

    __slots__ = ()

    @classmethod
    def of(cls, outcome: Measured) -> Self:
        """Read the figures of a trial; keys that are no field are left out.

        Raises:
            ValueError: If a figure is missing or of another type.
        """
        figures: Self = _adapter(cls).validate_python(outcome.figures)  # type: ignore[arg-type]  # classes are hashable
        return figures


# Building an adapter takes much longer than reading with it.
_adapter = functools.cache(TypeAdapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures(JobFigures):
    """Figures of a ``step`` job, of all its ranks together.

    They have all ranks' units, the slowest rank's seconds, and the highest memory of
    any rank.
    """

    steps: int
    """Steps that ran, warm-up included."""
    optimizer_steps: int
    """Steps that torch's optimizers took; 0 if the subject uses none of them."""
    step_s: tuple[float, ...]
    """Seconds of each timed step."""
    units_per_step: float
    """Units of throughput of a step: positions, padding included, for the bundled
    trainer; samples, unless the subject says otherwise."""
    peak_bytes: int
    """Peak use of the budget: on CUDA the allocator's reserve and non-PyTorch memory;
    on a CPU the growth of the process since before the model was built."""
    non_pytorch_bytes: int | None
    """Non-PyTorch memory of the device (context, workspaces); None on a CPU."""
    step_peak_bytes: tuple[int, ...] = ()
    """Highest memory within each step; on a CPU the growth of resident memory."""
    kept_bytes: tuple[int, ...] = ()
    """Memory in use after each step."""
    gradient_bytes: int = 0
    """Gradients that torch's optimizers hold after a step; 0 if there are none."""
    host_peak_bytes: int = 0
    """Highest resident memory of a rank's process."""
    trains: bool = False
    """True if one call takes many steps: a training loop."""
    loss: float | None = None
    """Loss of the last step, in nats; None if the subject does not report it."""
    model_flops_per_step: float | None = None
    """Model FLOPs of a step on all ranks; None if the subject does not count them."""
    local_ranks: int = 1
    """Ranks that took the steps together."""
    contents: PeakContents | None = None
    """Contents of the first rank's memory at the peak of the last step, or when it ran
    out; None unless they were requested."""
    settings: Mapping[str, Argument] = field(default_factory=dict)
    """Present values of settings that may be varied, as far as the step reports
    them."""
    imported: tuple[str, ...] = ()
    """Modules that were imported within the trial; on a CPU they count as its
    memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures(JobFigures):
    """Figures of a ``kernels`` job: kernels of a step, by the profiler."""

    kernels: tuple[KernelTime, ...]
    """Kernels of one rank, the longest first."""
    units_per_step: float
    """Units of throughput of a step on this rank."""
    step_s: float
    """Median time of a step without the profiler, in seconds."""
    roofline: Roofline
    """Rates of the device, measured in the same process."""


class GpuUseFigures(GpuUse):
    """Activity of one GPU over one window."""

    # Figures in trial logs also have the samples themselves, which are left out here.
    model_config = ConfigDict(strict=False, extra="ignore")

    samples: int = 0
    """Number of samples in the window."""
    used_bytes: int | None = None
    """Highest memory in use on the GPU, by all programs."""
    temperature_c: int | None = None
    """Highest temperature, in degrees Celsius."""
    lacking: str | None = None
    """Reason why there is no utilisation; None if there is."""
    gpm_windows: int = 0
    """Number of GPM's intervals in the window."""
    gpm_lacking: str | None = None
    """Reason why there are no figures of GPM; None if there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures(JobFigures):
    """Figures of a ``window`` job: a timed window of steps that a loader feeds.

    They are those of all local ranks together.
    """

    unit: str
    """Unit in which work is counted, as a plural: that of the request if the step or
    the loader counts its work, else ``batches``."""
    units_per_s: float
    """Units per second, without padding."""
    padded_units_per_s: float
    """Units per second, padding included; ``units_per_s`` if there is none."""
    counts_padding: bool = False
    """True if ``padded_units_per_s`` is counted apart from ``units_per_s``."""
    other_units_per_s: dict[str, float] = field(default_factory=dict)
    """Rates without padding in other units that the step or the loader counts, such as
    ``samples``, by their names."""
    steps: int
    """Steps in the window."""
    optimizer_steps: int
    """Steps that ran, discarded ones included."""
    gradient_accumulation_steps: int
    """Batches of an optimizer step on each rank."""
    discarded_batches: int
    """Batches taken before the window begins: warm-up, and those that the queues held
    ready, up to twice over."""
    local_ranks: int
    """Number of ranks."""
    data_wait_share: float
    """Share of the window in which a rank's device had nothing to do but wait for data,
    0 to 1. The waits of all ranks are added, as a rank that waits delays the others: so
    this is an upper bound on the cost of data loading."""
    window_start_s: float
    """Start of the window by CLOCK_MONOTONIC, which is the same for all processes: the
    GPUs are sampled by another one."""
    window_end_s: float
    """End of the window by CLOCK_MONOTONIC."""
    memory_bytes: int | None
    """Memory of the ranks and their DataLoader workers, shared pages counted in parts;
    None if it cannot be read."""
    worker_bytes: int | None
    """Private memory of the largest DataLoader worker; None without workers."""
    storage_bytes_per_s: float | None
    """Rate at which the kernel read from storage for the ranks and their DataLoader
    workers; None if it does not count."""
    processes: int | None = None
    """Most worker processes that the loader of a rank has started; None if they were
    not counted."""
    batch_bytes: int | None = None
    """Bytes of the tensors of the largest rank's last batch before the window."""
    epoch_batches: int | None = None
    """Batches of an epoch, if one ended; None otherwise."""
    model_flops_per_s: float | None = None
    """Model FLOP/s without padding; None if the step does not count FLOPs, or was
    replayed."""
    losses: tuple[float, ...] = ()
    """Loss of each step, warm-up included; empty unless the step keeps them."""
    gpus: tuple[GpuUseFigures, ...] = ()
    """Activity of each GPU in the window; empty without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures(JobFigures):
    """Figures of a ``links`` job: times of messages between ranks."""

    all: tuple[tuple[int, float], ...]
    """Bytes and seconds of each all-reduce over all ranks. The seconds are the slowest
    rank's, as in the fields below."""
    within: tuple[tuple[int, float], ...]
    """Bytes and seconds of each all-reduce within every node at once; empty if nodes
    have one rank."""
    between: tuple[tuple[int, float], ...]
    """Bytes and seconds of each all-reduce over the first ranks of all nodes; empty for
    one node."""
    neighbours_bytes_per_s: tuple[float, ...]
    """Bandwidth in each direction between each node and the next, the last one with the
    first."""
    matmul_flops_per_s: tuple[float, ...]
    """Matmul FLOP/s of each rank while all multiply: bf16 on GPUs, fp32 on CPUs."""
    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Ranks on each node."""
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

    It times optimizer steps of all ranks on cached batches of the dataset.
    """

    step_s: tuple[float, ...]
    """Time of each step on its slowest rank."""
    optimizer_step_s: float
    """Median time of the weights' update alone, on the slowest rank."""
    communication_s: float | None
    """Median wait for gradients after the last ones were sent; None if it cannot be
    measured."""
    compute_s_by_rank: tuple[tuple[float, ...], ...]
    """Time of forward and backward of each step, without waiting for other ranks; empty
    if it cannot be measured."""
    forward_share: float | None
    """Share of forward and backward together that forward takes; None if it cannot be
    measured."""
    gradients: tuple[tuple[int, float], ...]
    """Elements of each gradient, and the share of the backward pass after which it was
    ready, in order of that share."""
    gradient_accumulation_steps: int
    """Micro-batches of an optimizer step on each rank."""
    micro_batch_size: int
    """Sequences of a micro-batch."""
    tokens_per_step: float
    """Non-padding tokens of a step on all ranks."""
    peak_bytes: int | None
    """Highest growth of a rank's memory; None if it cannot be measured."""
    losses: tuple[float, ...]
    """Loss of each step, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortTrainingFigures(JobFigures):
    """Figures of a short training by the trainer's own command, or by code of yours.

    They are of all steps but the first ones, which include the warm-up.
    """

    tokens_per_s: float | None
    """Non-padding tokens/s, or the subject's units/s, on all ranks; None if too few
    steps ended in time."""
    steps: int
    """Optimizer steps that count."""
    seconds: float
    """Time of these steps."""
    mfu: float | None
    """Model FLOPs utilisation of these steps, as a share of the peak; None if it is not
    known."""


_FIGURES_BY_JOB: dict[str, type[JobFigures]] = {
    "step": StepFigures,
    "kernels": KernelFigures,
    "window": WindowFigures,
    "short_training": ShortTrainingFigures,
    "links": LinkFigures,
    "gradient_sync": GradientSyncFigures,
}
"""Figures of the jobs whose results several commands read from the trial log."""


def check_figures(job: str, outcome: Measured) -> None:
    """Check that an outcome has the figures of its job in this version.

    Figures of jobs that are not in ``_FIGURES_BY_JOB`` are not checked.

    Raises:
        ValueError: If a figure is missing or of another type.
    """
    figures_class = _FIGURES_BY_JOB.get(job)
    if figures_class is not None:
        figures_class.of(outcome)
