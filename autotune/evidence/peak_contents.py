"""Contents of the memory of a training step at its peak, by module and by kind."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trainer.formats.tables import StrictTable

Phase = Literal["forward", "backward", "optimizer step", "other"]
"""Part of a training step; ``other`` is none of them, such as copying a batch to the
device or clipping gradients."""
ContentsAt = Literal["none", "largest", "both"]
"""Sizes at which a probe records the contents of memory: the largest that fits, or also
the smallest that is out of memory."""
NO_MODULE = "(no module)"
"""Name of the row of memory that no module allocated or owns."""


class ContentKind(StrEnum):
    """Purpose of an allocation."""

    PARAMETERS = "parameters"
    """Parameters and buffers of modules, also those gathered from other ranks."""
    GRADIENTS = "gradients"
    """Gradients of parameters."""
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    """Results of forward that exist until backward begins: kept for backward."""
    TEMPORARIES = "temporaries"
    """Allocations of the step that are released before backward needs them, gradients
    of activations, and workspaces of operators."""
    INPUTS = "inputs"
    """Tensors that a model is called with, or that exist before forward."""
    OTHER = "other"
    """Memory that the step did not allocate, such as copies of weights, a data set on
    the device, gradient buckets of DDP and workspaces of cuBLAS."""


Kind = Annotated[ContentKind, Field(strict=False)]
"""Kind that a table may also read from its name."""


class ModuleContents(StrictTable):
    """Memory of a module, or of equal layers together, at the peak."""

    module: str
    """Qualified name, such as ``encoder.layers.* (12)`` for twelve equal layers."""
    bytes_by_kind: dict[Kind, PositiveInt]
    """Bytes by kind; kinds without memory are left out."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes_by_kind.values())

    def bytes_of(self, kind: ContentKind) -> int:
        """Return the bytes of one kind; 0 if there are none."""
        return self.bytes_by_kind.get(kind, 0)


class LargeAllocation(StrictTable):
    """One of the largest allocations that existed at the peak."""

    size_bytes: PositiveInt
    kind: Kind
    module: str
    """Qualified name of the module that owns or allocated it."""
    operator: str | None = None
    """Operator that allocated it, such as ``addmm``; None if it was not seen."""
    shape: list[NonNegativeInt] | None = None
    """Shape of its tensor; None if no module or operator was seen to use all of it."""
    dtype: str | None = None
    """Type of its elements, such as ``bfloat16``; None without a shape."""
    phase: Phase | None = None
    """Part of the step that allocated it; None if it existed before the step."""


class RefusedAllocation(StrictTable):
    """The allocation that ran out of memory."""

    size_bytes: PositiveInt | None = None
    """Requested size; None if the error does not tell it."""
    module: str
    """Qualified name of the module that requested it."""
    operator: str | None = None
    """Operator that requested it; None if no operator did."""
    input_shapes: list[list[NonNegativeInt]] = Field(default_factory=list)
    """Shapes of the operator's tensors."""


class PeakContents(StrictTable):
    """All memory at the peak of an optimizer step, or when it ran out of memory.

    The rows and ``not_attributed_bytes`` add up to ``peak_bytes`` exactly, less
    ``missed_releases_bytes``.
    """

    device: Literal["cpu", "cuda"]
    peak_bytes: NonNegativeInt
    """On CUDA the most memory that PyTorch's allocator gave out within the step, in its
    blocks; on a CPU the most bytes of tensors. If an allocation was refused, the memory
    at that moment, without the refused allocation."""
    reserved_bytes: NonNegativeInt | None = None
    """Memory that PyTorch's allocator held then, with its free blocks; None on a
    CPU."""
    phase: Phase
    """Part of the step in which the peak occurred."""
    module: str
    """Qualified name of the module that was computed at the peak."""
    operator: str | None = None
    """Operator that made the last allocation before the peak; None if none did."""
    rows: list[ModuleContents]
    """Memory by module, the most first."""
    not_attributed_bytes: NonNegativeInt = 0
    """Memory of the peak that was not seen to be allocated."""
    missed_releases_bytes: NonNegativeInt = 0
    """Memory in the rows that had been released unseen; 0 unless the step has too many
    allocations for the allocator's history."""
    largest: list[LargeAllocation] = Field(default_factory=list)
    """Largest allocations, in descending order."""
    refused: RefusedAllocation | None = None
    """Allocation that ran out of memory; None if the step completed."""
    is_compiled: bool = False
    """True if compiled code ran: its memory belongs to the module that was compiled as
    a whole, and an operator is the name of a compiled graph."""

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        row_bytes = sum(row.size_bytes for row in self.rows)
        other_bytes = self.not_attributed_bytes - self.missed_releases_bytes
        if row_bytes + other_bytes != self.peak_bytes:
            raise ValueError(
                f"modules with {row_bytes} bytes, {self.not_attributed_bytes} not"
                f" attributed, and {self.missed_releases_bytes} released unseen are"
                f" not the peak of {self.peak_bytes} bytes"
            )
        return self

    @property
    def bytes_by_kind(self) -> dict[ContentKind, int]:
        """Bytes of all modules by kind, in the order of ``ContentKind``."""
        by_kind: dict[ContentKind, int] = {}
        for kind in ContentKind:
            size_bytes = sum(row.bytes_of(kind) for row in self.rows)
            if size_bytes:
                by_kind[kind] = size_bytes
        return by_kind
