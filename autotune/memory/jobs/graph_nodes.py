"""Nodes of a compiled graph: what Inductor makes of each.

A node calls a library kernel, is a view, or is computed by a kernel that Inductor
generates, together with others.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch._prims import rng_prims

from autotune.speed.jobs.count_kernels import is_view

SEEDED = "drawn from a seed"
"""Mark in the ``meta`` of a node whose random numbers a kernel draws again from a
seed."""

_LIBRARY_OPERATORS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "convolution",
        "convolution_backward",
        "index_put",
        "index_add",
        "embedding_dense_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }
)
"""Kernels that Inductor calls instead of generating, so that their inputs and outputs
are in memory."""

_REDUCTIONS = frozenset(
    {"var_mean", "sum", "mean", "max", "amax", "amin", "prod", "argmax"}
)

_WRAPPED = {rng_prims.run_and_save_rng_state: 0, rng_prims.run_with_rng_state: 1}
"""Wrappers that save the random state, with the position of the operator among their
arguments."""


def is_library(node: fx.Node) -> bool:
    """Return whether a node calls a library kernel."""
    target = _operator(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        target.namespace not in {"aten", "prims"}
        or target._schema.name.removeprefix("aten::") in _LIBRARY_OPERATORS
    )


def library_call(node: fx.Node) -> tuple[Any, Any] | None:
    """Return the operator and the arguments of a call of a library.

    Returns:
        None for other nodes.
    """
    if not is_library(node):
        return None
    position = _WRAPPED.get(node.target)
    args = node.args if position is None else node.args[position + 1 :]
    return _operator(node), args


def _operator(node: fx.Node) -> Any:
    """Return the operator that a node calls, also inside a wrapper of random state."""
    position = _WRAPPED.get(node.target)
    return node.target if position is None else node.args[position]


def compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node's operator; the random state that a wrapper saves is empty."""
    if node.target is rng_prims.run_and_save_rng_state:
        return torch.empty(0), args[0](*args[1:], **kwargs)
    if node.target is rng_prims.run_with_rng_state:
        return args[1](*args[2:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node reduces a dimension."""
    return getattr(node.target, "__name__", "").split(".")[0] in _REDUCTIONS


def is_small(node: fx.Node) -> bool:
    """Return whether a node is a seed, a mean or a variance.

    Its users read it from memory, instead of computing it again.
    """
    source = node.args[0] if node.target is operator.getitem else node
    is_reduced = isinstance(source, fx.Node) and is_reduction(source)
    return SEEDED in node.meta or is_reduced


def waits(node: fx.Node) -> bool:
    """Return whether a kernel waits for the one before; copies of weights do not."""
    return is_library(node) or any(
        source.op != "placeholder" for source in node.all_input_nodes
    )


def may_overwrite(node: fx.Node) -> bool:
    """Return whether a kernel may write a node's result over an earlier value."""
    return (
        bool(node.users)
        and size_and_type(node) is not None
        and not _allocates(node)
        and not isinstance(node.meta["val"], tuple)
    )


def _allocates(node: fx.Node) -> bool:
    """Return whether a library allocates its results itself.

    Matmuls write into a given block.
    """
    return is_library(node) and (
        _operator(node).namespace != "aten" or "attention" in str(node.target)
    )


def size_and_type(node: fx.Node) -> tuple[int, torch.dtype] | None:
    """Return the number of elements and the dtype of a node's first result.

    Returns:
        None if it is no tensor, or of unknown size.
    """
    value = first_result(node.meta.get("val"))
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return None
    return value.numel(), value.dtype


def first_result(value: Any) -> Any:
    """Return the first of several results, or the only one."""
    return value[0] if isinstance(value, tuple) else value


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shares."""
    while node.op == "call_function" and (
        node.target is operator.getitem
        or (isinstance(node.target, torch._ops.OpOverload) and is_view(node.target))
    ):
        node = node.all_input_nodes[0]
    return node
