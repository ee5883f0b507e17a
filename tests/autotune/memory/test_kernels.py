"""Memory that kernels allocate internally."""

import torch
import torch.nn.attention.varlen  # registers the operator

from autotune.memory.jobs.kernels import request_rules

DOCUMENTS = 10
DOCUMENT_TOKENS = 100
HEADS = 12
HEAD_DIMENSIONS = 72
PADDED_HEAD_DIMENSIONS = 96
"""The kernel has no heads of 72 dimensions."""
TILE_POSITIONS = 64
"""Positions of a tile of the kernel for such heads."""
FP32_BYTES = 4


def test_memory_of_flash_attention_3_backward():
    rule = request_rules("cuda", "fa3")[
        torch.ops.torch_attn._varlen_attn_backward.default
    ]
    tokens = DOCUMENTS * DOCUMENT_TOKENS
    query = torch.empty(tokens, HEADS, HEAD_DIMENSIONS, device="meta")
    edges = torch.arange(0, tokens + 1, DOCUMENT_TOKENS, dtype=torch.int32)
    # 1,000 positions and a tile for each document, in whole tiles: 25.6 are 26 tiles.
    positions = 26 * TILE_POSITIONS
    numbers_bytes = FP32_BYTES * HEADS * positions
    gradients_bytes = numbers_bytes * PADDED_HEAD_DIMENSIONS
    _outputs, *blocks = rule(query, query, query, edges)
    # Each block occurs twice: when it is allocated and when it is released.
    assert [block.size_bytes for block in blocks] == 2 * [
        numbers_bytes,
        numbers_bytes,
        gradients_bytes,
    ]
