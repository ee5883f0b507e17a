"""Kernels of a compiled graph.

They are library calls, and loops into which Inductor fuses everything between them.
Values in memory and library calls are given. Loops over equally many elements are one
kernel if they share an input, or if one reads another's output, and no library call
must run between them. A sum over the leading dimensions, such as a bias gradient, is
one more kernel if it reads an output: rows must be complete before columns are summed.
Loops that scale by the largest of all values, as casts to float8 do, follow the one
that finds it.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.speed.jobs.count_kernels import (
    KernelCounter,
    kind_of,
    moved_bytes,
    tensors_in,
)
from autotune.speed.values import Kernel

_PARTIAL_SUMS_BYTES = 2**20
"""Values that the second kernel of a long sum reads, about."""


@dataclass(slots=True)
class _Loop:
    elements: int
    between: int
    """Number of library calls before it."""
    earliest: int
    """Number of library calls that it needs."""
    reads: set[fx.Node] = field(default_factory=set)
    writes: set[fx.Node] = field(default_factory=set)
    operators: list[Any] = field(default_factory=list)
    sums_columns: bool = False
    """True if a result is a sum over columns, such as a bias gradient, cast or not."""


def kernels_of(
    nodes: Sequence[fx.Node],
    stored: Collection[fx.Node],
    library_call: Callable[[fx.Node], tuple[Any, Any] | None],
    counter: KernelCounter,
) -> Iterator[Kernel]:
    """Yield the kernels of one call of a graph.

    Args:
        nodes: Nodes of the graph.
        stored: Values in memory.
        library_call: Function that returns operator and arguments of a library call,
            else None.
        counter: Count of kernels.
    """
    loops: list[_Loop] = []
    needs: dict[fx.Node, int] = {}
    """Number of library calls before which a value cannot be computed."""
    calls = 0
    for node in nodes:
        call = library_call(node)
        needs[node] = max((needs[one] for one in node.all_input_nodes), default=0)
        if call is not None:
            calls += 1
            needs[node] = calls
            args = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], call[1])
            # A wrapper that saves the random state has no value; those of its attention
            # are in its users.
            if (
                kernel := counter.kernel_of(call[0], args, {}, node.meta.get("val", ()))
            ) is not None:
                yield kernel
        elif node in stored:
            loop = _loop_of(node, stored, calls, needs[node], library_call)
            _add(loop, loops)
    for loop in loops:
        # What only the loop itself reads stays in registers.
        inside = {one for one in loop.writes if not _leaves(one, loop, stored)}
        moved = moved_bytes(_values(loop.reads - loop.writes)) + moved_bytes(
            _values(loop.writes - inside)
        )
        yield Kernel(kind_of(loop.operators), "", "", 0.0, moved)
        if loop.sums_columns:
            yield Kernel("norm", "", "", 0.0, _PARTIAL_SUMS_BYTES)
    yield Kernel("graph call")


def _leaves(value: fx.Node, loop: _Loop, stored: Collection[fx.Node]) -> bool:
    """Return whether a value leaves its loop.

    It does if anything but the loop reads it, or it is written into an argument.
    """
    waiting = list(value.users)
    while waiting:
        one = waiting.pop()
        if one.op == "output" or (one in stored and one not in loop.writes):
            return True
        if one not in stored:
            waiting.extend(one.users)
    return not value.users


def _loop_of(
    node: fx.Node,
    stored: Collection[fx.Node],
    between: int,
    earliest: int,
    library_call: Callable[[fx.Node], tuple[Any, Any] | None],
) -> _Loop:
    """Return the loop that computes a value, back to what is in memory."""
    loop = _Loop(elements=0, between=between, earliest=earliest, writes={node})
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        # Of several results of a library call, a loop reads only its own.
        is_result = one.target is operator.getitem and library_call(
            one.all_input_nodes[0]
        )
        is_in_memory = one in stored or one.op != "call_function" or is_result
        if one is not node and is_in_memory:
            loop.reads.add(one)
            continue
        loop.sums_columns |= _sums_columns(one)
        if hasattr(one.target, "_schema"):
            loop.operators.append(one.target)
        waiting.extend(one.all_input_nodes)
    loop.elements = max(
        (value.numel() for value in _values(loop.reads | {node})), default=0
    )
    return loop


def _add(loop: _Loop, loops: list[_Loop]) -> None:
    awaited = {one for one in loop.reads if waits_for_all(one)}
    for other in loops:
        late = not loop.earliest <= other.between <= loop.between
        if late or other.elements != loop.elements or awaited & other.writes:
            continue
        # Columns are summed along the way only if nothing that the loop writes is
        # needed for them.
        if loop.reads & other.writes and (loop.sums_columns or other.sums_columns):
            continue
        if loop.reads & (other.reads | other.writes):
            break
    else:
        loops.append(loop)
        return
    other.reads |= loop.reads
    other.writes |= loop.writes
    other.operators += loop.operators
    other.sums_columns = other.sums_columns and loop.sums_columns


def waits_for_all(node: fx.Node) -> bool:
    """Return whether a value is the largest of a tensor or of its columns.

    It is known only once all rows are read.
    """
    name = getattr(node.target, "__name__", "")
    return name == "max.default" or (name == "amax.default" and 0 in node.args[1])  # type: ignore[operator]  # a list


def _sums_columns(node: fx.Node) -> bool:
    """Return whether a value is a sum over all but the last dimension."""
    if (
        getattr(node.target, "__name__", "").split(".")[0] != "sum"
        or len(node.args) < 2
    ):
        return False
    dims = node.args[1]
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]  # a node
    return (
        isinstance(dims, list | tuple)
        and bool(dims)
        and rank - 1 not in {dim % rank for dim in dims}
    )


def _values(nodes: Collection[fx.Node]) -> list[torch.Tensor]:
    return tensors_in([node.meta.get("val") for node in nodes])
