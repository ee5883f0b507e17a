"""Stand-in for FlashAttention 4 on pretended GPUs: its allocations and launches.

Both were read from version 4.0.0b36, for heads of up to 64 dimensions on a Hopper GPU.
The real package compiles its kernels itself, which the stubs of CUDA do not allow.
"""

import torch
import triton

_TILE = 128
_SEARCHED_DOCUMENTS = 256
"""Number of documents from which on kernels look up the document of a tile."""


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_forward() -> None:
    pass


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_backward_preprocess() -> None:
    pass


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_backward() -> None:
    pass


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_backward_postprocess() -> None:
    pass


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_tile_sums() -> None:
    pass


@triton.jit  # type: ignore[untyped-decorator]
def flash_attention_4_documents_of_tiles() -> None:
    pass


def _flash_attn_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
    _check(q, k, v)
    heads = q.shape[1]
    out = q.new_empty(q.shape)
    log_sum_exp = q.new_empty((heads, len(q)), dtype=torch.float32)
    sums = _tile_sums(cu_seqlens_q)
    if sums is not None:
        documents = sums.new_empty(len(q) // _TILE + len(sums))
        flash_attention_4_documents_of_tiles[1,]()
        del documents
    flash_attention_4_forward[1,]()
    return out, log_sum_exp, None, None, None


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(q, k, v, out, dout, dq, dk, dv)
    tokens, heads, dimensions = q.shape
    rounded = (tokens + len(cu_seqlens_q) * _TILE - 1) // _TILE * _TILE
    dimensions = -(-dimensions // 32) * 32
    gradients = q.new_empty((heads, rounded * dimensions), dtype=torch.float32)
    sums = q.new_empty((heads, rounded), dtype=torch.float32)
    log_sum_exp = q.new_empty((heads, rounded), dtype=torch.float32)
    query_tiles = _tile_sums(cu_seqlens_q)
    key_tiles = _tile_sums(cu_seqlens_k)
    flash_attention_4_backward_preprocess[1,]()
    flash_attention_4_backward[1,]()
    flash_attention_4_backward_postprocess[1,]()
    del gradients, sums, log_sum_exp, query_tiles, key_tiles
    return dq, dk, dv


def _tile_sums(edges: torch.Tensor) -> torch.Tensor | None:
    if len(edges) - 1 <= _SEARCHED_DOCUMENTS:
        return None
    flash_attention_4_tile_sums[1,]()
    return torch.empty_like(edges)


def _check(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_cuda
        assert tensor.dtype == torch.bfloat16
        # Otherwise FlashAttention 4 copies its arguments.
        assert tensor.stride(-1) == 1
        assert tensor.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
