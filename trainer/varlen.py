"""FlashAttention over documents of different lengths, by the one kernel that the memory model knows.

Shapes: T query tokens, U key tokens, N documents, H heads, E head dimensions.
"""

import math

import torch
from torch.nn.attention.varlen import varlen_attn


def attend_documents(
    query_THE: torch.Tensor,
    key_UHE: torch.Tensor,
    value_UHE: torch.Tensor,
    *,
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    longest_query: int,
    longest_key: int,
    window_tokens: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention within each document; shape (T, H, E).

    Args:
        query_THE: Queries of all documents, one after the other.
        key_UHE: Keys.
        value_UHE: Values.
        query_edges: Shape (N + 1,), int32: where the queries of each document begin, and the last one's end.
        key_edges: The same for keys and values.
        longest_query: At least as many queries as the longest document has.
        longest_key: The same for keys.
        window_tokens: How far attention reaches to either side; None for the whole document.
        scale: Of the scores; None for E ** -0.5.
    """
    # Without a window torch >= 2.14 chooses cuDNN on Hopper and Blackwell, whose backward takes a dense workspace of
    # N x longest_query x H x E x 4 bytes: 35 GB for 946 packed sequences of BERT-large. A window that no document
    # exceeds is no window to FlashAttention, and is what cuDNN does not take.
    reach = longest_key if window_tokens is None else window_tokens
    named = scale is not None and not math.isclose(scale, query_THE.shape[-1] ** -0.5)
    attended = varlen_attn(
        query_THE,
        key_UHE,
        value_UHE,
        query_edges,
        key_edges,
        longest_query,
        longest_key,
        window_size=(reach, reach),
        scale=scale if named else None,
    )
    assert isinstance(attended, torch.Tensor)
    return attended
