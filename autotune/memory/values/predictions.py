"""Predicted memory: by term, and by way of sharing a model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of one GPU at its peak, by part; parts are shared in different ways."""

    parameters_bytes: int
    """Parameters, or the GPU's shard of them."""
    gradients_bytes: int
    """Gradients, or the GPU's shard of them."""
    optimizer_bytes: int
    """State of the optimizer, or the GPU's shard of it."""
    activations_bytes: int
    """Activations that are kept for backward."""
    head_and_loss_bytes: int
    """Logits, and other blocks of the MLM head and the loss."""
    temporaries_bytes: int
    """Blocks that are allocated and released within a step, and all other blocks that
    GPUs do not share."""
    non_pytorch_bytes: int
    """Non-PyTorch memory: context, NCCL, handles."""
    gathered_bytes: int = 0
    """The layer that ZeRO-3 has gathered at the peak; 0 under other strategies."""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state, which ZeRO shards."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return (
            self.state_bytes
            + self.activations_bytes
            + self.head_and_loss_bytes
            + self.temporaries_bytes
            + self.non_pytorch_bytes
            + self.gathered_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Memory of one GPU under one way of sharing a model."""

    name: str
    """Name of the way, such as ``ZeRO-1`` or ``TP 2``."""
    trains_here: bool
    """True if this project's trainer supports it; the others are formulas for
    comparison."""
    total_bytes: int
    """Memory of the GPU at its peak."""
    fits: bool
    """True if the memory is within the GPU's budget."""
    held: MemoryParts
    """Memory of the GPU by part, which adds up to ``total_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Memory at its peak, by term; the terms add up to the peak."""

    micro_batch_size: int
    """Micro-batch size at which the memory is predicted."""
    terms_bytes: Mapping[str, int]
    """Memory by term: each is a ``Term``, or a term of ``activations_of``."""
    peak_bytes: int
    """Sum of all terms."""

    @property
    def largest_term(self) -> str:
        """Name of the largest term."""
        return max(self.terms_bytes, key=self.terms_bytes.__getitem__)
