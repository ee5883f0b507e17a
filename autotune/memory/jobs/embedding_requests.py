"""Memory that an embedding's backward allocates internally on CUDA.

The constants and requests are those of EmbeddingBackwardKernel.cu.
"""

import torch

from autotune.memory.jobs.allocator_requests import OUTPUTS, Block, Requests

_INT64_BYTES = 8
_FP32_BYTES = 4
_MAX_SIMPLE_INDICES = 3072
"""Most indices for which backward needs no memory."""
_MAX_SIMPLE_WEIGHTS = 527
"""Most weights for which backward needs only counts."""
_SEGMENT_INDICES = 10
"""Indices per partial sum: NROWS_PER_THREAD."""


def embedding_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    weights: int,
    *_: object,
    **__: object,
) -> Requests:
    """Return the requests of ``embedding_backward_cuda_kernel``.

    It sorts the indices, cuts equal ones into segments, and adds up partial sums.

    Args:
        gradient: Gradient of the embedded tokens.
        indices: Their indices.
        weights: Number of rows of the embedding table.
    """
    # With few indices, every block below is empty.
    count = 0
    if indices.numel() > _MAX_SIMPLE_INDICES:
        count = indices.numel()
    indices_bytes = _INT64_BYTES * count
    ids = Block(indices_bytes)
    ordered_ids = Block(indices_bytes)
    ordered = Block(indices_bytes)
    offsets = Block(indices_bytes)
    unique = Block(indices_bytes)
    # Recorded from the allocator: a sort takes second copies of its keys and values,
    # and a 32nd of one more.
    sorting = Block(2 * indices_bytes + indices_bytes // 32)
    segments = min(count, weights)
    segment_sizes = Block(_INT64_BYTES * segments)
    segment_ends = Block(_INT64_BYTES * segments)
    partials = 0
    if count:
        partials = count // _SEGMENT_INDICES + segments
    partial_starts = Block(_INT64_BYTES * partials)
    sums_bytes = _FP32_BYTES * partials * gradient.shape[-1]
    if weights <= _MAX_SIMPLE_WEIGHTS:
        sums_bytes = partial_starts.size_bytes
    sums = Block(sums_bytes)
    return (
        ids,
        ordered_ids,
        ordered,
        sorting,
        sorting,
        ordered,
        OUTPUTS,
        offsets,
        unique,
        unique,
        segment_sizes,
        segment_ends,
        partial_starts,
        sums,
        sums,
        partial_starts,
        segment_ends,
        segment_sizes,
        offsets,
        ordered_ids,
        ids,
    )
