"""Nodes of a compiled graph, and how Inductor computes each of them.

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
"""Names of operators that reduce a dimension."""

_OPERATOR_POSITION = {
    rng_prims.run_and_save_rng_state: 0,
    # The saved state comes first.
    rng_prims.run_with_rng_state: 1,
}
"""Position of the operator among the arguments of the wrappers that save and restore
the random state; the operator's own arguments follow it. Torch has no public name for
these wrappers."""


def is_library_call(node: fx.Node) -> bool:
    """Return whether a node calls a library kernel."""
    target = _operator(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    is_custom = target.namespace not in {"aten", "prims"}
    name = target._schema.name.removeprefix("aten::")
    return is_custom or name in _LIBRARY_OPERATORS


def library_call(node: fx.Node) -> tuple[Any, Any] | None:
    """Return the operator and the positional arguments of a library call.

    Returns:
        None for other nodes.
    """
    if not is_library_call(node):
        return None
    position = _OPERATOR_POSITION.get(node.target)
    args = node.args if position is None else node.args[position + 1 :]
    return _operator(node), args


def _operator(node: fx.Node) -> Any:
    """Return the operator that a node calls, also inside a wrapper of random state."""
    position = _OPERATOR_POSITION.get(node.target)
    return node.target if position is None else node.args[position]


def call_operator(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node's operator. The random state that a wrapper saves is empty.

    Args:
        node: The node.
        args: Positional arguments of the node, with values in place of nodes.
        kwargs: Keyword arguments of the node, with values in place of nodes.
    """
    position = _OPERATOR_POSITION.get(node.target)
    if position is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    result = args[position](*args[position + 1 :], **kwargs)
    if node.target is rng_prims.run_and_save_rng_state:
        return torch.empty(0), result
    return result


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node reduces a dimension."""
    return getattr(node.target, "__name__", "").split(".")[0] in _REDUCTIONS


def is_seed_or_reduced(node: fx.Node) -> bool:
    """Return whether a node is a seed, or a result of a reduction such as a variance.

    Such values are small: users read them from memory, instead of computing them again.
    """
    source = node.args[0] if node.target is operator.getitem else node
    is_reduced = isinstance(source, fx.Node) and is_reduction(source)
    return SEEDED in node.meta or is_reduced


def follows_a_kernel(node: fx.Node) -> bool:
    """Return whether a kernel can run only after another one.

    A value that is computed from arguments of the graph alone, such as a copy of a
    weight, does not wait for any kernel.
    """
    return is_library_call(node) or any(
        source.op != "placeholder" for source in node.all_input_nodes
    )


def may_overwrite(node: fx.Node) -> bool:
    """Return whether a kernel may write a node's result over an earlier value."""
    return (
        bool(node.users)
        and size_and_type(node) is not None
        and not _allocates_results(node)
        and not isinstance(node.meta["val"], tuple)
    )


def _allocates_results(node: fx.Node) -> bool:
    """Return whether a library kernel allocates its results itself.

    Matmuls write into a given block.
    """
    if not is_library_call(node):
        return False
    return _operator(node).namespace != "aten" or "attention" in str(node.target)


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
