"""Values of predicted speed: kernels of a step, constants of a machine, predictions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from autotune.base.interval import Interval
from autotune.trials.values import JobName, TrialRequest
from trainer.formats.tables import StrictTable

KernelKind = Literal[
    "matmul",
    "attention",
    "copy",
    "math",
    "norm",
    "softmax",
    "random",
    "embedding",
    "optimizer",
    "graph call",
]
"""Kinds of kernels, by what their time depends on.

``copy``: arithmetic on each element, casts and copies. ``math``: GELU, exponentials and
the like. ``norm``: layer norms and sums. ``random``: dropout masks. A kernel that does
several of them has the last of these kinds. ``graph call``: the host's work for one
call of a compiled graph, besides its kernels.
"""


class Kernel(NamedTuple):
    """A kernel, or several alike ones."""

    kind: KernelKind
    name: str = ""
    """Of attention, the kernel and the direction, such as ``varlen backward``."""
    dtype: str = "fp32"
    flops: float = 0.0
    """Of matmuls and attention; others only move bytes."""
    moved_bytes: int = 0
    """Bytes that it reads and writes, each tensor once."""
    document_tokens: float = 0.0
    """Of attention: the keys of a query, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Kernels of one optimizer step of a rank, counted in a trace."""

    micro_batch_size: int
    padded_tokens: int
    """Positions of all micro-batches of the step, padding included."""
    model_flops: float
    """FLOPs that the model requires for the non-padding tokens, as MFU counts them."""
    kernels: tuple[tuple[Kernel, int], ...]
    """Kernels, with how often each is launched."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self) | {
            "kernels": [[*kernel, count] for kernel, count in self.kernels]
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "StepWork":
        """Read the result of ``to_json``."""
        kernels = tuple(
            (Kernel(*fields), int(count)) for *fields, count in value["kernels"]
        )
        return cls(**{**value, "kernels": kernels})

    def bytes_of(self, *kinds: KernelKind) -> int:
        """Return the bytes that kernels of these kinds read and write."""
        return sum(
            kernel.moved_bytes * count
            for kernel, count in self.kernels
            if kernel.kind in kinds
        )


class MatmulRates(StrictTable):
    """Time of a matmul.

    It has a rate for FLOPs, another for its operands and result, and a fixed part.
    """

    flops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    fixed_s: NonNegativeFloat = 0.0


class AttentionRates(StrictTable):
    """Rate of an attention kernel on long documents.

    It is half as fast on documents of ``half_tokens``.
    """

    flops_per_s: PositiveFloat
    half_tokens: NonNegativeFloat = 0.0


class PassRate(StrictTable):
    """Rate of a kernel that only reads and writes."""

    moved_bytes: PositiveInt
    bytes_per_s: PositiveFloat


class MachineRates(StrictTable):
    """Constants of a machine from which the time of a step follows."""

    device: str
    """Name of the GPU, or model of the CPU."""
    processors: int = 0
    """Allotted CPUs of the measurement; 0 if they do not matter."""
    source: str
    matmul: dict[str, MatmulRates]
    """By dtype."""
    attention: dict[str, AttentionRates]
    """By kernel and direction, then dtype, such as ``varlen backward bf16``."""
    passes: dict[str, list[PassRate]]
    """Rates of other kernels, by kind, then by size, ascending; kinds that are missing
    have the rates of ``copy``."""
    kernel_s: NonNegativeFloat
    """Fixed time of a kernel on the device."""
    launch_s: NonNegativeFloat
    """Host time per kernel, eager."""
    compiled_launch_s: NonNegativeFloat
    """Host time per kernel of a compiled graph."""
    graph_call_s: NonNegativeFloat
    """Host time of a call of a compiled graph, forward or backward, besides its
    launches."""
    host_runs_ahead: bool
    """True if the host launches kernels while the device computes earlier ones."""
    range_share: NonNegativeFloat
    """Share by which a prediction may be off to either side."""


class RatesRequest(TrialRequest):
    """Request to measure a machine's constants."""

    job: ClassVar[JobName] = "rates"

    device: Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPrediction:
    """Predicted speed of a training step on one rank."""

    device: str
    source: str
    micro_batch_size: int
    step_s: Interval
    padded_tokens_per_s: Interval
    """Tokens/s including padding, without waiting for data or other ranks."""
    non_padding_tokens_per_s: Interval | None
    mfu: Interval | None
    """Model FLOP/s as a share of the device's dense peak; None if that is not known."""
    parts_s: Mapping[str, float]
    """Seconds of matmuls, attention, memory-bound kernels, optimizer and host; they add
    up to the step."""
