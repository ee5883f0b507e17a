"""Kernels of a traced step: their FLOPs and bytes, from shapes alone.

Bytes are those that they read and write.

Shapes: B batch, M rows, N columns and K inner elements of a matmul; H heads, S queries,
U keys, E dimensions of a head.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.speed.values import Kernel, KernelKind

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_DTYPES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8")
_MATMULS = {
    "mm": 0,
    "bmm": 0,
    "_scaled_mm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_addmm_activation": 1,
}
"""Operators by the position of their first factor."""
_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_flash_attention_for_cpu": "cpu",
    "_varlen_attn": "varlen",
}
KernelOf = Callable[[Any, Any, float], Kernel]
"""Function that returns the kernel of an operator's call, by the call's arguments, its
result, and the mean length of a document."""
BACKWARD_MATMULS = 2.5
"""FLOPs of an attention's backward, as a multiple of its forward's: five matmuls for
two."""
_TILE = 128
"""Tokens of a tile of FlashAttention for heads of 64."""
_ORDER: tuple[KernelKind, ...] = (
    "copy",
    "embedding",
    "norm",
    "math",
    "softmax",
    "random",
)
"""Kinds that can be fused, from the cheapest to the most expensive."""
_KINDS: dict[str, KernelKind] = {
    **dict.fromkeys(
        (
            "gelu",
            "gelu_backward",
            "silu",
            "silu_backward",
            "exp",
            "erf",
            "tanh",
            "tanh_backward",
        ),
        "math",
    ),
    **dict.fromkeys(
        (
            "native_layer_norm",
            "native_layer_norm_backward",
            "sum",
            "mean",
            "var_mean",
        ),
        "norm",
    ),
    **dict.fromkeys(
        (
            "_softmax",
            "_softmax_backward_data",
            "_log_softmax",
            "_log_softmax_backward_data",
        ),
        "softmax",
    ),
    **dict.fromkeys(
        ("native_dropout", "bernoulli_", "rand", "inductor_random"), "random"
    ),
    **dict.fromkeys(
        (
            "embedding",
            "embedding_dense_backward",
            "index_select",
            "gather",
            "index_add",
            "index_put",
        ),
        "embedding",
    ),
    **dict.fromkeys(
        ("_fused_adamw_", "_foreach_norm", "_foreach_mul_", "_foreach_copy_"),
        "optimizer",
    ),
}
_WRITES_ONLY = frozenset(
    {
        "zero_",
        "fill_",
        "zeros",
        "zeros_like",
        "new_zeros",
        "full",
        "full_like",
        "new_full",
        "ones",
        "ones_like",
        "arange",
        "bernoulli_",
        "scalar_tensor",
    }
)
_MOVES_NOTHING = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
)
_READS_RESULT = frozenset({"embedding", "index_select", "gather"})
"""Operators that read only as much of a table as they return."""


class KernelCounter:
    """Count of kernels.

    Args:
        document_tokens: Mean length of a document, which bounds its queries' keys.
        own_kernels: Kernels of operators that are not torch's, by operator.
    """

    def __init__(
        self,
        document_tokens: float,
        own_kernels: Mapping[Any, KernelOf] = MappingProxyType({}),
    ) -> None:
        self._document_tokens = document_tokens
        self._own_kernels = own_kernels
        self.counts: Counter[Kernel] = Counter()

    def add(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Count the kernel of an operator's call."""
        if (kernel := self.kernel_of(function, args, kwargs, result)) is not None:
            self.counts[kernel] += 1

    def kernel_of(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> Kernel | None:
        """Return the kernel of an operator's call; None for views and allocations."""
        own_kernel = self._own_kernels.get(function)
        if own_kernel is not None:
            return own_kernel(args, result, self._document_tokens)
        name, launches = _name_of(function)
        if not launches:
            return None
        if name in _MATMULS:
            factors = args[_MATMULS[name] : _MATMULS[name] + 2]
            return matmul_kernel(factors, tensors_in(result))
        forward = name.removesuffix("_backward")
        if forward in _ATTENTION:
            return _attention(
                _ATTENTION[forward],
                name != forward,
                args,
                result,
                self._document_tokens,
            )
        written = moved_bytes(tensors_in(result))
        if name in _WRITES_ONLY:
            read = 0
        elif name in _READS_RESULT:
            read = written
        elif name in {"_foreach_copy_", "copy_"}:
            read, written = (
                moved_bytes(tensors_in(args[1])),
                moved_bytes(tensors_in(args[0])),
            )
        else:
            read = moved_bytes(tensors_in((args, tuple(kwargs.values()))))
            if name.endswith("_") and not written:  # in place, without a result
                written = read
        return (
            Kernel(_KINDS.get(name, "copy"), "", "", 0.0, read + written)
            if read + written
            else None
        )


def matmul_kernel(
    factors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] = (),
) -> Kernel:
    """Return the kernel of a matmul.

    Args:
        factors: Its two factors.
        results: Its results, the product first.
        others: Other tensors that it reads.
    """
    first = factors[0]
    flops = 2.0 * results[0].numel() * first.shape[-1]
    moved = moved_bytes((*factors, *results, *others))
    return Kernel("matmul", "", number_format(first), flops, moved)


def number_format(tensor: torch.Tensor) -> str:
    """Return the format of a tensor's numbers; fp32 for those without rates."""
    return _DTYPES.get(tensor.dtype, "fp32")


def kind_of(functions: Sequence[Any]) -> KernelKind:
    """Return the kind of a kernel into which several operators are fused."""
    kinds = {_KINDS.get(_name_of(function)[0], "copy") for function in functions}
    return max(
        (kind for kind in kinds if kind in _ORDER), key=_ORDER.index, default="copy"
    )


def moved_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors; an expanded dimension is in memory once."""
    sizes = (
        (one.element_size(), zip(one.shape, one.stride(), strict=True))
        for one in tensors
    )
    return sum(
        each * math.prod(size for size, stride in dims if stride or not size)
        for each, dims in sizes
    )


def _attention(
    kernel: str, backward: bool, args: Any, result: Any, document_tokens: float
) -> Kernel:
    query, key = args[backward : backward + 2]
    if kernel == "varlen":
        queries, heads, width = query.shape
        pairs_of_sides = [
            one for one in args if isinstance(one, list | tuple) and len(one) == 2
        ]
        window = next((one[0] for one in pairs_of_sides if one[0] is not None), -1)
        keys = keys_in_window(window, document_tokens)
        pairs = queries * heads * keys
    else:
        (batch, heads, queries, width), keys = query.shape, float(key.shape[-2])
        pairs = batch * heads * queries * keys
    flops = 4.0 * pairs * width * (BACKWARD_MATMULS if backward else 1.0)
    moved = moved_bytes(tensors_in((args, result)))
    name = f"{kernel} {'backward' if backward else 'forward'}"
    return Kernel("attention", name, number_format(query), flops, moved, keys)


def keys_in_window(window: int, document_tokens: float) -> float:
    """Return the keys of a query, on average.

    Args:
        window: Reach of attention to either side; negative for the whole document.
        document_tokens: Mean length of a document.
    """
    if window < 0:
        return document_tokens
    # Tiles of queries and keys that a window touches are computed whole.
    return min(document_tokens, _TILE * (2.0 * math.ceil(window / _TILE) + 1))


@functools.cache
def _name_of(function: Any) -> tuple[str, bool]:
    """Return the name of an operator, and whether it launches a kernel."""
    name = function._schema.name.split("::")[-1]
    return name, not is_view(function) and name not in _MOVES_NOTHING


def is_view(function: Any) -> bool:
    """Return whether all results of an operator are views of its arguments.

    They share memory, and the operator changes none of it.
    """
    returns = function._schema.returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested arguments or results."""
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
