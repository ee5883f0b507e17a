"""Memory that backward of CUDA's attention kernels allocates internally.

The rule of an operator takes its arguments. All of these kernels add up gradients of
queries in fp32, and keep numbers in fp32 for each query position and head.
"""

import torch

from autotune.memory.decide.rounding import ceil_divide, round_up
from autotune.memory.jobs.allocator_requests import OUTPUTS, Block, Requests

_FP32_BYTES = 4

FLASH_POSITIONS = 128
"""FlashAttention 2 rounds every document up to a multiple of this many positions."""
_FLASH_WIDTH = 32
"""FlashAttention 2 rounds heads up to a multiple of this many dimensions."""

_FA4_TILES = ((64, 128, 32), (96, 64, 32), (128, 80, 32), (192, 64, 64), (256, 64, 64))
"""Backward of FlashAttention 4 on Hopper GPUs: the widest head in dimensions, the query
positions of a tile, and the multiple of dimensions to which heads are rounded up."""

_EFFICIENT_WIDTH = 64
"""Widest head of the smaller kernel of memory-efficient attention; the larger one takes
twice as many dimensions."""
_EFFICIENT_SMALL_BLOCK = 64
"""Query positions of a block of memory-efficient attention for narrow heads or fp32."""
_EFFICIENT_LARGE_BLOCK = 128
"""Query positions of a block of memory-efficient attention in all other cases."""
_EFFICIENT_HEADER_BYTES = 16
"""Header of each block in which memory-efficient attention keeps gradients."""


def flash_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *_: object, **__: object
) -> Requests:
    """Return the requests of ``mha_bwd`` in torch's flash_api.cpp."""
    batch, heads, positions, width = query.shape
    padded_positions = batch * round_up(positions, FLASH_POSITIONS)
    return flash_requests(padded_positions, heads, width)


def varlen_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *others: object, **_: object
) -> Requests:
    """Return the requests of ``mha_varlen_bwd``, which rounds up every document."""
    positions, heads, width = query.shape
    padding = FLASH_POSITIONS * count_documents(others)
    return flash_requests(positions + padding, heads, width)


def flash_requests(padded_positions: int, heads: int, width: int) -> Requests:
    """Return the requests of FlashAttention 2: a number per position, and gradients."""
    numbers = Block(_FP32_BYTES * padded_positions * heads)
    gradients = Block(numbers.size_bytes * round_up(width, _FLASH_WIDTH))
    return (OUTPUTS, numbers, gradients, gradients, numbers)


def fa4_requests(query: torch.Tensor, documents: int) -> Requests:
    """Return the requests of ``_flash_attn_bwd`` in flash-attn-4 4.0.0b36.

    Read from its ``flash_attn/cute/interface.py``, and recorded from it with kernels
    that do nothing. It keeps two numbers per position, instead of one. Python releases
    all blocks, in the order in which they were allocated.
    """
    positions, heads, width = query.shape
    tile, multiple = next(
        (tile, multiple) for widest, tile, multiple in _FA4_TILES if width <= widest
    )
    # Each document may begin a tile, and the end of the last one is counted too.
    padded_positions = (positions + (documents + 1) * tile - 1) // tile * tile
    first_numbers = Block(_FP32_BYTES * heads * padded_positions)
    second_numbers = Block(_FP32_BYTES * heads * padded_positions)
    gradients = Block(first_numbers.size_bytes * round_up(width, multiple))
    blocks = (gradients, first_numbers, second_numbers)
    return (OUTPUTS, *blocks, *blocks)


def count_documents(arguments: tuple[object, ...]) -> int:
    """Return the number of documents in a call of varlen attention.

    Their edges are the first int32 tensor among its arguments.
    """
    edges = next(
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.int32
    )
    return edges.numel() - 1


def efficient_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *_: object, **__: object
) -> Requests:
    """Return the requests of memory-efficient attention, in kernel_backward.h.

    It keeps a number per position, and gradients of queries in blocks with a header.
    """
    batch, heads, positions, width = query.shape
    numbers = Block(_FP32_BYTES * batch * heads * positions)
    is_narrow = width <= _EFFICIENT_WIDTH
    padded_width = _EFFICIENT_WIDTH if is_narrow else 2 * _EFFICIENT_WIDTH
    is_fp32 = query.dtype == torch.float32
    block_positions = _EFFICIENT_LARGE_BLOCK
    if is_narrow or is_fp32:
        block_positions = _EFFICIENT_SMALL_BLOCK
    blocks = batch * heads * ceil_divide(positions, block_positions)
    gradients_bytes = _FP32_BYTES * block_positions * padded_width
    gradients = Block(blocks * (gradients_bytes + _EFFICIENT_HEADER_BYTES))
    if not is_fp32:
        return (OUTPUTS, numbers, gradients, numbers, gradients)
    # No fused kernel multiplies fp32 gradients with results: their product is stored
    # and summed, and the sums are copied into ``numbers``.
    product = Block(_FP32_BYTES * query.numel())
    sums = Block(numbers.size_bytes)
    return (
        OUTPUTS,
        product,
        sums,
        numbers,
        sums,
        product,
        gradients,
        numbers,
        gradients,
    )
