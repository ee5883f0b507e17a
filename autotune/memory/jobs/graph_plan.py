"""Memory of a compiled graph, planned after Inductor's rules.

Pointwise operations and reductions are fused into the kernels that use them. Memory is
allocated for inputs and outputs of library kernels, for results of a graph, and for
values that are read several times and cost many reads. A kernel writes over values that
were read for the last time just before.
"""

import operator
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.graph_nodes import (
    base_of,
    call_operator,
    first_result,
    follows_a_kernel,
    is_library_call,
    is_reduction,
    is_seed_or_reduced,
    library_call,
    may_overwrite,
    size_and_type,
)
from autotune.speed.jobs.fused_kernels import kernels_of, waits_for_all

aten = torch.ops.aten


class GraphPlan:
    """The graph of one forward or backward; values that are in memory are recorded."""

    def __init__(self, graph: fx.GraphModule, recorder: AllocationRecorder) -> None:
        self._recorder = recorder
        self._graph = graph
        self._nodes = list(graph.graph.nodes)
        placement = _place_values(self._nodes)
        self._stored = placement.stored
        self._last_read = _last_read_by_node(
            self._nodes, self._stored, separates_results=True
        )
        self._overwritten = self._plan_overwriting(placement)
        """Earlier value that a later one is written over, by the later one."""
        self._kernels = Counter(
            kernels_of(self._nodes, self._stored, library_call, recorder.kernels)
        )

    def _plan_overwriting(self, placement: "_Placement") -> dict[fx.Node, fx.Node]:
        """Return the earlier value that a later one is written over, by the later."""
        results = {base_of(node) for node in self._nodes[-1].all_input_nodes}
        reusable = placement.stored - results
        overwriting = _Overwriting(placement)
        last_read = _last_read_by_node(
            self._nodes, self._stored, separates_results=False
        )
        for node in self._nodes:
            dying = [
                value
                for value in last_read.get(node, ())
                if value in reusable and size_and_type(value)
            ]
            overwriting.choose_memory(node, dying)
        return overwriting.overwritten

    def run(self, *inputs: Any) -> Any:
        """Run the graph on tensors without content, and return its results.

        Args:
            inputs: Tensors of the graph's placeholders, in their order.
        """
        values: dict[fx.Node, Any] = {}
        # Values that others are written over. None stands for a value until the last
        # node that reads it has run; from then on this dictionary keeps it alive.
        kept: dict[fx.Node, Any] = dict.fromkeys(self._overwritten.values())
        remaining_inputs = iter(inputs)
        # Each input is released when it is read for the last time.
        del inputs
        self._recorder.kernels.counts.update(self._kernels)
        with self._recorder.paused():
            for node in self._nodes:
                if node.op == "placeholder":
                    values[node] = next(remaining_inputs)
                elif node.op == "get_attr":
                    values[node] = getattr(self._graph, str(node.target))
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], values.__getitem__)
                else:
                    self._run_node(node, values, kept)
                for value in self._last_read.get(node, ()):
                    if value in kept:
                        kept[value] = first_result(values[value])
                    del values[value]
        raise AssertionError("a graph without an output")

    def _run_node(
        self, node: fx.Node, values: dict[fx.Node, Any], kept: dict[fx.Node, Any]
    ) -> None:
        """Compute a node, into the block of an earlier value if it overwrites one.

        No variable may hold a tensor when this returns, or it is released too late.

        Args:
            node: Node that calls an operator.
            values: Values that are read again, by node; the result is added.
            kept: Values that are written over, as in ``run``.
        """
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        library = node.target if is_library_call(node) else None
        with self._recorder.requested(library, args, kwargs):
            values[node] = call_operator(node, args, kwargs)
            if node in self._overwritten:
                earlier = self._overwritten[node]
                block = kept.pop(earlier)
                if block is None:
                    # This node is the last to read it.
                    block = first_result(values[earlier])
                values[node] = block.as_strided(
                    values[node].size(), values[node].stride()
                )
            elif node in self._stored:
                self._recorder.record_results(values[node])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Values of a graph that are in memory; kernels compute all others as needed."""

    stored: Set[fx.Node]
    """Values that are written to memory."""
    reducing: Set[fx.Node]
    """Values computed by a kernel that also reduces."""


def _place_values(nodes: Sequence[fx.Node]) -> _Placement:
    """Decide which values are in memory."""
    # Imported late, as it is slow to import and only traces of compiled layers need it.
    from torch._inductor import config

    stored = _needed_in_memory(nodes)
    reducing: set[fx.Node] = set()
    # Values in memory that a kernel reads to compute a value, by that value.
    reads: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        sources = node.all_input_nodes
        reads[node] = set().union(*(reads[source] for source in sources))
        # A value that several operations read is computed once if it reads much
        # itself.
        is_costly = len(reads[node]) > config.realize_reads_threshold
        is_read_often = len(node.users) > 1
        if is_costly and is_read_often and base_of(node) is node:
            stored.add(node)
        fused = [source for source in sources if source not in stored]
        if is_reduction(node) or any(source in reducing for source in fused):
            reducing.add(node)
        if node in stored or node.op != "call_function" or is_seed_or_reduced(node):
            reads[node] = {node}
    computed = {node for node in stored if node.op == "call_function"}
    return _Placement(stored=computed, reducing=reducing)


def _needed_in_memory(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return inputs and outputs of library kernels, and results of the graph."""
    needed: set[fx.Node] = set()
    for node in nodes:
        writes_argument = node.target is aten.copy_.default
        if is_library_call(node) or waits_for_all(node) or writes_argument:
            needed.add(node)
    for node in nodes:
        if node.op == "output" or is_library_call(node):
            needed |= {base_of(source) for source in node.all_input_nodes}
    return needed


def _last_read_by_node(
    nodes: Sequence[fx.Node], stored: Set[fx.Node], *, separates_results: bool
) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that nothing reads after a node, by that node.

    Args:
        nodes: Nodes of the graph.
        stored: Values in memory.
        separates_results: True to release each of several results of a library call
            after its own last reader, False to keep all until the last one is read.
    """
    position = {node: number for number, node in enumerate(nodes)}
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in reversed(nodes):
        # A fused operation reads its inputs only when its kernel runs.
        readers = []
        for user in node.users:
            takes_result = (
                separates_results
                and user.target is operator.getitem
                and is_library_call(node)
            )
            reads_itself = user in stored or user.op == "output" or takes_result
            readers.append(user if reads_itself else last_reader[user])
        last_reader[node] = max((node, *readers), key=position.__getitem__)
    last_read: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last_reader.items():
        last_read.setdefault(reader, []).append(node)
    return last_read


class _Overwriting:
    """Assignment of values to the memory of earlier ones of the same size and type.

    A pointwise kernel writes over its inputs, and any kernel over values that the one
    before was last to read. Nodes are computed in the order of the graph.
    """

    def __init__(self, placement: _Placement) -> None:
        self.overwritten: dict[fx.Node, fx.Node] = {}
        """Earlier value that a later one is written over, by the later one."""
        self._placement = placement
        self._free = _FreeValues()
        self._kernel = 0
        """Number of the kernel that computes the node."""
        self._is_fusing = False
        """True if the kernel is a generated one, which further values may join."""

    def choose_memory(self, node: fx.Node, dying: Sequence[fx.Node]) -> None:
        """Decide whether a node is written over an earlier value.

        Args:
            node: Next node in the order of the graph.
            dying: Values that this node is the last to read.
        """
        earlier = None
        if node in self._placement.stored:
            self._join_or_begin_kernel(node)
            earlier = self._value_to_overwrite(node, dying)
        if earlier is not None:
            self.overwritten[node] = earlier
            self._free.remove(earlier)
        for value in dying:
            if value is not earlier:
                self._free.add(self._kernel, value)

    def _join_or_begin_kernel(self, node: fx.Node) -> None:
        """Number the kernel that computes a node; values of one loop share a kernel."""
        if not follows_a_kernel(node):
            return
        if is_library_call(node) or not self._is_fusing:
            self._kernel += 1
        self._is_fusing = not is_library_call(node)

    def _value_to_overwrite(
        self, node: fx.Node, dying: Sequence[fx.Node]
    ) -> fx.Node | None:
        """Return the value that a node is written over; None for a new block."""
        if not may_overwrite(node):
            return None
        is_pointwise = self._is_fusing and node not in self._placement.reducing
        if is_pointwise:
            for value in dying:
                if size_and_type(value) == size_and_type(node):
                    return value
        return self._free.last_read_by(self._kernel - 1, node)


class _FreeValues:
    """Values that no later node reads, by size and type, with their last kernel."""

    def __init__(self) -> None:
        self._by_size_and_type: dict[Any, list[tuple[int, fx.Node]]] = {}
        """Number of the kernel that read a value last, and the value."""

    def add(self, kernel: int, value: fx.Node) -> None:
        """Add a value that a kernel was last to read."""
        values = self._by_size_and_type.setdefault(size_and_type(value), [])
        values.append((kernel, value))

    def last_read_by(self, kernel: int, node: fx.Node) -> fx.Node | None:
        """Return the newest value of a node's size and type that a kernel read last.

        Returns:
            None if there is no such value.
        """
        values = self._by_size_and_type.get(size_and_type(node), [])
        for reading_kernel, value in reversed(values):
            if reading_kernel == kernel:
                return value
        return None

    def remove(self, removed: fx.Node) -> None:
        """Remove a value that is written over."""
        key = size_and_type(removed)
        self._by_size_and_type[key] = [
            (kernel, value)
            for kernel, value in self._by_size_and_type.get(key, [])
            if value is not removed
        ]
