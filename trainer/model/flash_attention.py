"""Varlen attention as operators of our own, computed by FlashAttention 2 or 4.

torch's registry of FlashAttention does not fit version 4: torch 2.11 rejects its
backward, and torch 2.13 expects two results where version 4 returns five. So the
operators call ``flash_attn.cute.interface`` themselves. Their fake implementations let
``torch.compile`` and traces without a GPU follow.

FlashAttention 4 is never imported before a kernel runs, as its import takes seconds.

Queries, keys and values come joined, as a matmul makes them, and so do their gradients:
FlashAttention 4 reads and writes parts of one tensor. That of torch cannot: its
backward allocates its results (``_flash_attention_backward`` has no overload that takes
them, and the C++ function that does is not exported), so that one copy joins them.

Shapes: T query tokens, U key tokens, N documents, P parts, H heads, E dimensions of a
head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.model.varlen_kernels import VarlenKernel, VarlenKernels

_WHOLE_DOCUMENT = -1
"""Reach of attention that has no window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Documents between whose tokens there is attention, and its parameters."""

    query_edges: torch.Tensor
    """Start of each document's queries, and the end of the last one's, int32, shape
    (N + 1,). Documents may be empty."""
    key_edges: torch.Tensor
    """The same for keys and values. A document with queries has keys."""
    max_query_length: int
    """Upper bound of the queries of a document."""
    max_key_length: int
    """Upper bound of the keys of a document."""
    window_tokens: int | None
    """Reach of attention to either side; None for the whole document."""
    scale: float | None
    """Factor of the scores; None means E ** -0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFunctions:
    """Functions that call one kernel."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Return the result, shape (T, H, E), and the log-sum-exp of the scores, fp32,
    shape (H, T), of query, key, value and segments."""
    backward: Callable[..., list[torch.Tensor]]
    """Return the gradients of the joined tensors, in their shapes, of the gradient of
    the result, the joined tensors, the result, its log-sum-exp and segments."""


def attend_joined(
    joined: Sequence[torch.Tensor], segments: Segments, kernels: VarlenKernels
) -> torch.Tensor:
    """Return attention within each document; shape (T, H, E).

    Args:
        joined: Tensors whose parts are query, key and value, in this order: one of
            shape (T, 3, H, E), or a query (T, 1, H, E) with keys and values
            (U, 2, H, E), or three with a part each. The last dimension is contiguous.
        segments: The documents.
        kernels: Kernels of forward and backward.
    """
    attended_THE: torch.Tensor
    attended_THE, _ = _attend(
        list(joined),
        segments.query_edges,
        segments.key_edges,
        segments.max_query_length,
        segments.max_key_length,
        _WHOLE_DOCUMENT if segments.window_tokens is None else segments.window_tokens,
        segments.scale,
        kernels.forward,
        kernels.backward,
    )
    return attended_THE


@torch.library.custom_op("trainer::attend_documents", mutates_args=())
def _attend(  # noqa: PLR0917 - arguments of an operator have an order
    joined: Sequence[torch.Tensor],
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    max_query_length: int,
    max_key_length: int,
    window_tokens: int,
    scale: float | None,
    forward_kernel: str,
    backward_kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and its log-sum-exp."""
    segments = _segments(
        query_edges, key_edges, max_query_length, max_key_length, window_tokens, scale
    )
    return KERNELS[forward_kernel].forward(*parts_of(joined), segments)


@_attend.register_fake
def _attend_fake(
    joined: Sequence[torch.Tensor], *others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, forward_kernel, _backward_kernel = others
    query_THE = parts_of(joined)[0]
    tokens, heads, _dimensions = query_THE.shape
    log_sum_exp_HT = query_THE.new_empty((heads, tokens), dtype=torch.float32)
    return _empty_part(query_THE, forward_kernel), log_sum_exp_HT


@torch.library.custom_op("trainer::attend_documents_backward", mutates_args=())
def _attend_backward(  # noqa: PLR0917 - arguments of an operator have an order
    gradient: torch.Tensor,
    joined: Sequence[torch.Tensor],
    attended: torch.Tensor,
    log_sum_exp: torch.Tensor,
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    max_query_length: int,
    max_key_length: int,
    window_tokens: int,
    scale: float | None,
    kernel: str,
) -> list[torch.Tensor]:
    """Return the gradients of the joined tensors, in their shapes."""
    segments = _segments(
        query_edges, key_edges, max_query_length, max_key_length, window_tokens, scale
    )
    return KERNELS[kernel].backward(gradient, joined, attended, log_sum_exp, segments)


@_attend_backward.register_fake
def _attend_backward_fake(
    _gradient: torch.Tensor, joined: Sequence[torch.Tensor], *others: object
) -> list[torch.Tensor]:
    kernel = others[-1]
    return [
        _empty_part(tensor[:, 0], kernel).unsqueeze(1)
        if tensor.shape[1] == 1
        else tensor.new_empty(tensor.shape)
        for tensor in joined
    ]


def _empty_part(part: torch.Tensor, kernel: object) -> torch.Tensor:
    """Return a tensor with the shape and strides of what a kernel computes for a part.

    FlashAttention 2 keeps the order in which a dense tensor lies in memory.
    """
    return torch.empty_like(part) if kernel == "fa2" else part.new_empty(part.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    joined, query_edges, key_edges, *numbers, _forward_kernel, ctx.kernel = inputs
    ctx.numbers = numbers
    # The log-sum-exp has no gradient; without this, it gets a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*joined, *output, query_edges, key_edges)


def _backward(
    ctx: Any, gradient: torch.Tensor, _log_sum_exp_gradient: None
) -> tuple[Any, ...]:
    *joined, attended, log_sum_exp, query_edges, key_edges = ctx.saved_tensors
    gradients = _attend_backward(
        gradient,
        joined,
        attended,
        log_sum_exp,
        query_edges,
        key_edges,
        *ctx.numbers,
        ctx.kernel,
    )
    return gradients, *([None] * (4 + len(ctx.numbers)))


_attend.register_autograd(_backward, setup_context=_keep_for_backward)

ATTEND = torch.ops.trainer.attend_documents.default
"""Operator of forward; its first argument are the joined tensors, its last two the
kernels of forward and backward."""
ATTEND_BACKWARD = torch.ops.trainer.attend_documents_backward.default
"""Operator of backward; its first two arguments are the gradient of the result and the
joined tensors, its last one is the kernel."""


def parts_of(joined: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return query, key and value, which are views of the joined tensors."""
    parts: list[torch.Tensor] = []
    for tensor in joined:
        # Backward of ``unbind`` copies, even a single part.
        is_alone = tensor.shape[1] == 1
        parts += [tensor.squeeze(1)] if is_alone else tensor.unbind(1)
    return parts


def join_like(
    joined: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return parts joined as the parts of other tensors are; a single one as it is."""
    remaining = list(parts)
    results: list[torch.Tensor] = []
    for tensor in joined:
        number = tensor.shape[1]
        same_tensor, remaining = remaining[:number], remaining[number:]
        if number == 1:
            results.append(same_tensor[0].unsqueeze(1))
        else:
            result = tensor.new_empty(tensor.shape)
            results.append(torch.stack(same_tensor, dim=1, out=result))
    return results


def _segments(
    query_edges: torch.Tensor, key_edges: torch.Tensor, *numbers: Any
) -> Segments:
    """Return segments of an operator's arguments, ``numbers`` in their order."""
    max_query_length, max_key_length, window_tokens, scale = numbers
    return Segments(
        query_edges=query_edges,
        key_edges=key_edges,
        max_query_length=max_query_length,
        max_key_length=max_key_length,
        window_tokens=None if window_tokens == _WHOLE_DOCUMENT else window_tokens,
        scale=scale,
    )


def _forward_of_2(
    query_THE: torch.Tensor,
    key_UHE: torch.Tensor,
    value_UHE: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torch's FlashAttention 2."""
    attended_THE, log_sum_exp_HT, *_ = torch.ops.aten._flash_attention_forward(
        query_THE,
        key_UHE,
        value_UHE,
        segments.query_edges,
        segments.key_edges,
        segments.max_query_length,
        segments.max_key_length,
        0.0,  # dropout
        False,  # not causal
        False,  # no dropout mask for debugging
        scale=segments.scale,
        window_size_left=segments.window_tokens,
        window_size_right=segments.window_tokens,
    )
    return attended_THE, log_sum_exp_HT


def _backward_of_2(
    gradient_THE: torch.Tensor,
    joined: Sequence[torch.Tensor],
    attended_THE: torch.Tensor,
    log_sum_exp_HT: torch.Tensor,
    segments: Segments,
) -> list[torch.Tensor]:
    """Call torch's FlashAttention 2, and join its gradients."""
    # Only dropout reads the random state.
    random_state = torch.empty(2, dtype=torch.uint64, device=gradient_THE.device)
    unused = torch.empty(0, device=gradient_THE.device)
    gradients = torch.ops.aten._flash_attention_backward(
        gradient_THE,
        *parts_of(joined),
        attended_THE,
        log_sum_exp_HT,
        segments.query_edges,
        segments.key_edges,
        segments.max_query_length,
        segments.max_key_length,
        0.0,  # dropout
        False,  # not causal
        random_state,
        unused,
        scale=segments.scale,
        window_size_left=segments.window_tokens,
        window_size_right=segments.window_tokens,
    )
    return join_like(joined, gradients)


def _forward_of_4(
    query_THE: torch.Tensor,
    key_UHE: torch.Tensor,
    value_UHE: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call FlashAttention 4."""
    attended_THE, log_sum_exp_HT, *_ = _interface()._flash_attn_fwd(
        query_THE, key_UHE, value_UHE, return_lse=True, **_options_of_4(segments)
    )
    return attended_THE, log_sum_exp_HT


def _backward_of_4(
    gradient_THE: torch.Tensor,
    joined: Sequence[torch.Tensor],
    attended_THE: torch.Tensor,
    log_sum_exp_HT: torch.Tensor,
    segments: Segments,
) -> list[torch.Tensor]:
    """Call FlashAttention 4, which writes into parts of the joined gradients."""
    gradients = [tensor.new_empty(tensor.shape) for tensor in joined]
    query_gradient_THE, key_gradient_UHE, value_gradient_UHE = parts_of(gradients)
    _interface()._flash_attn_bwd(
        *parts_of(joined),
        attended_THE,
        gradient_THE,
        log_sum_exp_HT,
        dq=query_gradient_THE,
        dk=key_gradient_UHE,
        dv=value_gradient_UHE,
        **_options_of_4(segments),
    )
    return gradients


def _options_of_4(segments: Segments) -> dict[str, Any]:
    """Return the arguments that both directions of FlashAttention 4 take.

    A window makes it choose slower kernels, so there is none for whole documents.
    """
    return {
        "softmax_scale": segments.scale,
        "cu_seqlens_q": segments.query_edges,
        "cu_seqlens_k": segments.key_edges,
        "max_seqlen_q": segments.max_query_length,
        "max_seqlen_k": segments.max_key_length,
        "window_size_left": segments.window_tokens,
        "window_size_right": segments.window_tokens,
    }


def _interface() -> Any:
    """Return FlashAttention 4's module of functions, imported at the first call."""
    from flash_attn.cute import interface

    return interface


KERNELS: dict[VarlenKernel | str, KernelFunctions] = {
    "fa2": KernelFunctions(forward=_forward_of_2, backward=_backward_of_2),
    "fa4": KernelFunctions(forward=_forward_of_4, backward=_backward_of_4),
}
"""Functions of each kernel; on devices that have none, tests replace them."""
