"""Allocations of compiled functions.

AOTAutograd's graphs are run on the meta device, and fused as Inductor fuses them.
``torch.compile`` decides from the graph alone which activations are saved for backward
and which are recomputed; torch makes that decision here too, without a compiler. Only
the generated kernels are assumed, after Inductor's rules. Pointwise operations and
reductions are fused into the kernels that use them. Memory is allocated for inputs and
outputs of library kernels, for results of a graph, and for values that are read several
times and cost many reads. A kernel writes over values that were read for the last time
just before.
"""

import functools
import importlib
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._prims import rng_prims
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term, activations_of
from autotune.speed.jobs.count_kernels import is_view
from autotune.speed.jobs.fused_kernels import kernels_of, waits_for_all
from trainer.model.precision import COMPILER_SAVES_COMPACT

aten = torch.ops.aten

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
_SEEDED = "drawn from a seed"
"""Mark of a node whose random numbers a kernel draws again from a seed."""
_CLASS = "class of the data"
"""Key of the class of a dataclass instance that was opened to a dictionary."""
_TENSOR = "a tensor"
"""Placeholder for a tensor among the arguments on whose values a graph depends."""


class Compiled:
    """A function as ``torch.compile`` would run it.

    Equivalent functions share ``graphs``.

    ``module`` is the one whose parameters and buffers it uses; None for a function of
    its arguments alone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        recorder: AllocationRecorder,
        graphs: dict[Any, Callable[..., Any]],
    ) -> None:
        self._function = function
        self._module = module
        self._recorder = recorder
        self._graphs = graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and a module's hooks around it, which are not compiled."""
        module = self._module
        if module is None:
            return self._run({}, args, kwargs)
        for before in module._forward_pre_hooks.values():
            args = before(module, args) or args
        state = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        result = self._run(state, args, kwargs)
        for after in module._forward_hooks.values():
            after(module, args, result)
        return result

    def _run(
        self,
        state: dict[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the graph for arguments of this kind, which is made at the first call."""
        leaves, spec = pytree.tree_flatten(
            (args, {name: _opened(value) for name, value in kwargs.items()})
        )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple(
            _TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )
        inputs = [*state.values(), *tensors]
        key = (
            _kind(self._module),
            str(others),
            str(spec),
            torch.is_grad_enabled(),
            *map(_shape, inputs),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._make_graph(list(state), spec, others)
        owner = self._recorder.owner
        # Backward owns temporaries already.
        if self._module is not None and owner != Term.TEMPORARIES:
            owner = activations_of(self._module)
        with self._recorder.owned_by(owner):
            return graph(*inputs)

    def _make_graph(
        self, names: Sequence[str], spec: pytree.TreeSpec, others: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return the function with forward and backward as graphs.

        Args:
            names: Parameters and buffers among the inputs, which are the first.
            spec: Structure of the arguments.
            others: Leaves of the arguments, with placeholders for tensors.
        """
        compile_: Any = importlib.import_module("functorch.compile")
        from torch._inductor.decomposition import select_decomp_table

        checkpointed = _checkpoints_in_forward(self._module)

        def whole(*inputs: torch.Tensor) -> Any:
            state = dict(zip(names, inputs, strict=False))
            rest = iter(inputs[len(names) :])
            leaves = [next(rest) if other is _TENSOR else other for other in others]
            args, opened = pytree.tree_unflatten(leaves, spec)
            kwargs = {name: _closed(value) for name, value in opened.items()}
            if self._module is None:
                return self._function(*args, **kwargs)
            # Dynamo marks checkpointed parts instead of tracing their recomputation.
            replaced: dict[str, Any] = {
                "_compiled_call_impl": None,
                "_forward_pre_hooks": {},
                "_forward_hooks": {},
            }
            if checkpointed:
                replaced["_gradient_checkpointing_func"] = _call
            with (
                mock.patch.multiple(self._module, **replaced),
                mock.patch("trainer.compilation.checkpoint", _call),
            ):
                return torch.func.functional_call(self._module, state, args, kwargs)

        def planned(graph: fx.GraphModule, _: object) -> Any:
            return compile_.make_boxed_func(_Plan(graph, self._recorder).run)

        function = compile_.aot_function(
            whole,
            fw_compiler=planned,
            bw_compiler=planned,
            partition_fn=functools.partial(_partition, checkpointed=checkpointed),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

        def called(*inputs: torch.Tensor) -> Any:
            with self._recorder.paused():
                return function(*inputs)

        return called


def _checkpoints_in_forward(module: nn.Module | None) -> bool:
    """Return whether a module's forward checkpoints activations.

    If its call does so instead, hooks do the same here.
    """
    return (
        module is not None
        and module.training
        and bool(getattr(module, "gradient_checkpointing", False))
        and type(module).__call__ is nn.Module.__call__
    )


class _Plan:
    """The graph of one forward or backward; values that are in memory are recorded."""

    def __init__(self, graph: fx.GraphModule, recorder: AllocationRecorder) -> None:
        self._recorder = recorder
        self._attributes = graph
        self._nodes = list(graph.graph.nodes)
        self._reducing: set[fx.Node] = set()
        """Values computed by a kernel that also reduces."""
        self._stored = self._in_memory()
        self._last = self._last_readers()
        self._reused = self._reuses()
        self._kernels = Counter(
            kernels_of(self._nodes, self._stored, _library_call, recorder.kernels)
        )

    def _in_memory(self) -> set[fx.Node]:
        """Return the values that are written to memory."""
        stored: set[fx.Node] = set()
        for node in self._nodes:
            # ``copy_`` writes into an argument.
            if (
                _is_library(node)
                or waits_for_all(node)
                or node.target is aten.copy_.default
            ):
                stored.add(node)
        for node in self._nodes:
            if node.op == "output" or _is_library(node):
                stored |= {_base(source) for source in node.all_input_nodes}
        self._add_expensive(stored)
        return {node for node in stored if node.op == "call_function"}

    def _add_expensive(self, stored: set[fx.Node]) -> None:
        """Add values that are read several times and cost many reads."""
        from torch._inductor import config

        reads: dict[fx.Node, set[fx.Node]] = {}
        for node in self._nodes:
            reads[node] = set().union(
                *(reads[source] for source in node.all_input_nodes)
            )
            # A value that several operations read is computed once if it reads much
            # itself.
            if (
                len(reads[node]) > config.realize_reads_threshold
                and len(node.users) > 1
                and _base(node) is node
            ):
                stored.add(node)
            fused = [source for source in node.all_input_nodes if source not in stored]
            if _is_reduction(node) or any(source in self._reducing for source in fused):
                self._reducing.add(node)
            if node in stored or node.op != "call_function" or _is_read(node):
                reads[node] = {node}

    def _reuses(self) -> dict[fx.Node, fx.Node]:
        """Return the earlier value over which a later one is written, by the later one.

        Both have the same size and type. A pointwise kernel writes over its inputs, and
        any kernel over values that the one before was last to read.
        """
        free = _FreeValues()
        reused: dict[fx.Node, fx.Node] = {}
        results = {_base(node) for node in self._nodes[-1].all_input_nodes}
        kernel = 0
        is_fusing = False
        for node in self._nodes:
            dying = [
                value
                for value in self._last.get(node, ())
                if value in self._stored - results and _size_and_type(value)
            ]
            if node in self._stored:
                if _waits(node):
                    if _is_library(node) or not is_fusing:
                        kernel += 1
                    is_fusing = not _is_library(node)
                if _may_overwrite(node):
                    inputs = []
                    if is_fusing and node not in self._reducing:
                        kind = _size_and_type(node)
                        inputs = [
                            value for value in dying if _size_and_type(value) == kind
                        ]
                    candidates = [*inputs, *free.last_read_by(kernel - 1, node)]
                    if candidates:
                        earlier = candidates[0]
                        reused[node] = earlier
                        dying = [value for value in dying if value is not earlier]
                        free.remove(earlier)
            for value in dying:
                free.add(kernel, value)
        return reused

    def _last_readers(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the values that nothing reads after a node, by that node."""
        position = {node: number for number, node in enumerate(self._nodes)}
        last: dict[fx.Node, fx.Node] = {}
        for node in reversed(self._nodes):
            # A fused operation reads its inputs only when its kernel runs.
            users = [
                user if user in self._stored or user.op == "output" else last[user]
                for user in node.users
            ]
            last[node] = max((node, *users), key=position.__getitem__)
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in last.items():
            dying.setdefault(reader, []).append(node)
        return dying

    def run(self, *inputs: Any) -> Any:
        """Run the graph on tensors without content."""
        values: dict[fx.Node, Any] = {}
        kept: dict[fx.Node, Any] = dict.fromkeys(self._reused.values())
        rest = iter(inputs)
        del inputs
        self._recorder.kernels.counts.update(self._kernels)
        with self._recorder.paused():
            for node in self._nodes:
                if node.op == "placeholder":
                    values[node] = next(rest)
                elif node.op == "get_attr":
                    values[node] = getattr(self._attributes, str(node.target))
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], values.__getitem__)
                else:
                    self._run_node(node, values, kept)
                for value in self._last.get(node, ()):
                    if value in kept:
                        kept[value] = _first(values[value])
                    del values[value]
        raise AssertionError("a graph without an output")

    def _run_node(
        self, node: fx.Node, values: dict[fx.Node, Any], kept: dict[fx.Node, Any]
    ) -> None:
        """Compute a node, into the block of an earlier value if it reuses one.

        No variable may hold a tensor when this returns, or it is released too late.
        """
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        library = node.target if _is_library(node) else None
        with self._recorder.requested(library, args, kwargs):
            values[node] = _compute(node, args, kwargs)
            if node in self._reused:
                earlier = self._reused[node]
                block = kept.pop(earlier)
                if block is None:
                    block = _first(values[earlier])
                values[node] = block.as_strided(
                    values[node].size(), values[node].stride()
                )
            elif node in self._stored:
                self._recorder.keep(values[node])


class _FreeValues:
    """Values that no later node reads, by size and type, with their last kernel."""

    def __init__(self) -> None:
        self._by_kind: dict[Any, list[tuple[int, fx.Node]]] = {}

    def add(self, kernel: int, value: fx.Node) -> None:
        """Add a value that a kernel was last to read."""
        self._by_kind.setdefault(_size_and_type(value), []).append((kernel, value))

    def last_read_by(self, kernel: int, node: fx.Node) -> list[fx.Node]:
        """Return the newest value of a node's size and type from a kernel, if any."""
        values = self._by_kind.get(_size_and_type(node), [])
        return [value for number, value in values if number == kernel][-1:]

    def remove(self, removed: fx.Node) -> None:
        """Remove a value that is written over."""
        kind = _size_and_type(removed)
        values = self._by_kind.get(kind, [])
        self._by_kind[kind] = [
            (number, value) for number, value in values if value is not removed
        ]


def _waits(node: fx.Node) -> bool:
    """Return whether a kernel waits for the one before; copies of weights do not."""
    return _is_library(node) or any(
        source.op != "placeholder" for source in node.all_input_nodes
    )


def _partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    checkpointed: bool,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a graph into forward and backward as Inductor does."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in joint.graph.nodes:
        is_redrawn = node.target is aten.rand.default and (
            checkpointed or COMPILER_SAVES_COMPACT
        )
        is_forward = (
            node.op == "call_function"
            and node.meta.get("partitioner_tag") != "is_backward"
        )
        reads_redrawn = any(_SEEDED in source.meta for source in node.all_input_nodes)
        if is_forward and (checkpointed or is_redrawn or reads_redrawn):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0
        if is_redrawn:
            # From a seed, within the kernel that uses it: a constant stands for it.
            node.target = aten.full.default
            node.args = (*node.args, 0.0)
            node.meta[_SEEDED] = True
    return min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", **options
    )


def _call(function: Callable[..., Any], *args: Any, **_: object) -> Any:
    """Call a function without checkpointing."""
    return function(*args)


def _opened(value: Any) -> Any:
    """Return a dataclass instance as a dictionary, so that the tensors in it are found.

    Other values are returned unchanged.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    opened = {field.name: getattr(value, field.name) for field in fields(value)}
    return {_CLASS: type(value), **opened}


def _closed(value: Any) -> Any:
    """Return the dataclass instance that was opened; other values unchanged."""
    if isinstance(value, dict) and _CLASS in value:
        return value.pop(_CLASS)(**value)
    return value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _is_read(node: fx.Node) -> bool:
    """Return whether users read a small value from memory.

    That is a seed, a mean or a variance.
    """
    source = node.args[0] if node.target is operator.getitem else node
    is_reduced = isinstance(source, fx.Node) and _is_reduction(source)
    return _SEEDED in node.meta or is_reduced


def _is_reduction(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _REDUCTIONS


def _size_and_type(node: fx.Node) -> Any:
    """Return the number of elements and the dtype of a node's first result.

    Returns:
        None if it is no tensor, or of unknown size.
    """
    value = _first(node.meta.get("val"))
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return None
    return value.numel(), value.dtype


def _may_overwrite(node: fx.Node) -> bool:
    """Return whether a kernel may write a node's result over an earlier value."""
    return (
        bool(node.users)
        and _size_and_type(node) is not None
        and not _allocates(node)
        and not isinstance(node.meta["val"], tuple)
    )


def _allocates(node: fx.Node) -> bool:
    """Return whether a library allocates its results itself.

    Matmuls write into a given block.
    """
    return _is_library(node) and (
        _operator(node).namespace != "aten" or "attention" in str(node.target)
    )


def _operator(node: fx.Node) -> Any:
    """Return the operator that a node calls, also inside a wrapper of random state."""
    position = _WRAPPED.get(node.target)
    return node.target if position is None else node.args[position]


def _library_call(node: fx.Node) -> tuple[Any, Any] | None:
    """Return the operator and the arguments of a call of a library.

    Returns:
        None for other nodes.
    """
    if not _is_library(node):
        return None
    position = _WRAPPED.get(node.target)
    args = node.args if position is None else node.args[position + 1 :]
    return _operator(node), args


def _compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node's operator; the random state that a wrapper saves is empty."""
    if node.target is rng_prims.run_and_save_rng_state:
        return torch.empty(0), args[0](*args[1:], **kwargs)
    if node.target is rng_prims.run_with_rng_state:
        return args[1](*args[2:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_library(node: fx.Node) -> bool:
    target = _operator(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        target.namespace not in {"aten", "prims"}
        or target._schema.name.removeprefix("aten::") in _LIBRARY_OPERATORS
    )


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shares."""
    while node.op == "call_function" and (
        node.target is operator.getitem
        or (isinstance(node.target, torch._ops.OpOverload) and is_view(node.target))
    ):
        node = node.all_input_nodes[0]
    return node


def _kind(module: nn.Module | None) -> Any:
    """Return the key of a module's graph besides tensors.

    Returns:
        A key that is equal for modules that differ only in their index.
    """
    if module is None:
        return ()
    return tuple(
        (name, type(part), part.training, "forward" in vars(part), _settings(part))
        for name, part in module.named_modules()
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the plain attributes of a module, without private ones and its index."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple)
        and not name.startswith(("_", "layer_idx"))
    )


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad
