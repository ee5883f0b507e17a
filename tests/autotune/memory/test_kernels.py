"""Memory that kernels allocate internally."""

import math

import torch
import torch.nn.attention.varlen  # registers the operator

from autotune.memory.jobs.kernels import request_rules

DOCUMENTS = 10
DOCUMENT_TOKENS = 100
HEADS = 12
HEAD_DIMENSIONS = 72
PADDED_HEAD_DIMENSIONS = 96
"""Next wider head for which the kernel exists."""
TILE_POSITIONS = 64
"""Positions of a tile of the kernel for such heads."""
FP32_BYTES = 4


def test_fa3_backward_pads_heads_and_documents():
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    rule = request_rules("cuda", "fa3")[backward]
    tokens = DOCUMENTS * DOCUMENT_TOKENS
    # The gradient, the query and the key have the same shape.
    tensor = torch.empty(tokens, HEADS, HEAD_DIMENSIONS, device="meta")
    edges = torch.arange(0, tokens + 1, DOCUMENT_TOKENS, dtype=torch.int32)
    # Each document may need one tile more than its positions fill.
    tiles = math.ceil((tokens + DOCUMENTS * TILE_POSITIONS) / TILE_POSITIONS)
    # The kernel keeps two such statistics: numbers in fp32 for each head and position.
    statistic_bytes = FP32_BYTES * HEADS * tiles * TILE_POSITIONS
    query_gradient_bytes = statistic_bytes * PADDED_HEAD_DIMENSIONS
    _outputs, *blocks = rule(tensor, tensor, tensor, edges)
    # Each block occurs twice: when it is allocated and when it is released.
    assert [block.size_bytes for block in blocks] == 2 * [
        statistic_bytes,
        statistic_bytes,
        query_gradient_bytes,
    ]
