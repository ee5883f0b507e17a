"""Allocations of compiled functions: AOTAutograd's graphs, run on the meta device and fused as Inductor fuses them.

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
_CLASS = "class of the data"
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
        tape: AllocationRecorder,
        graphs: dict[Any, Callable[..., Any]],
    ) -> None:
        self._function, self._module, self._tape, self._graphs = (
            function,
            module,
            tape,
            graphs,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and a module's hooks around it, which are not compiled."""
        state: dict[str, torch.Tensor] = {}
        if self._module is not None:
            for hook in self._module._forward_pre_hooks.values():
                args = hook(self._module, args) or args
            state = dict(
                itertools.chain(
                    self._module.named_parameters(), self._module.named_buffers()
                )
            )
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
            graph = self._graphs[key] = self._made(list(state), spec, others)
        forward = self._module is not None and self._tape.owner != Term.TEMPORARIES
        with self._tape.owned_by(
            activations_of(self._module) if forward else self._tape.owner
        ):
            result = graph(*inputs)
        for hook in (
            () if self._module is None else self._module._forward_hooks.values()
        ):
            hook(self._module, args, result)
        return result

    def _made(
        self, names: Sequence[str], spec: pytree.TreeSpec, others: Sequence[Any]
    ) -> Callable[..., Any]:
        compile_: Any = importlib.import_module("functorch.compile")
        from torch._inductor.decomposition import select_decomp_table

        # True if the module's forward checkpoints activations; outside it, hooks do the
        # same here.
        layer = self._module
        wanted = (
            layer is not None
            and layer.training
            and bool(getattr(layer, "gradient_checkpointing", False))
        )
        checkpointed = wanted and type(layer).__call__ is nn.Module.__call__

        def whole(*inputs: torch.Tensor) -> Any:
            state = dict(zip(names, inputs, strict=False))
            rest = iter(inputs[len(names) :])
            leaves = [next(rest) if other is _TENSOR else other for other in others]
            args, opened = pytree.tree_unflatten(leaves, spec)
            kwargs = {
                name: (
                    value.pop(_CLASS)(**value)
                    if isinstance(value, dict) and _CLASS in value
                    else value
                )
                for name, value in opened.items()
            }
            if self._module is None:
                return self._function(*args, **kwargs)
            # Dynamo marks checkpointed parts instead of tracing their recomputation.
            replaced: dict[str, Any] = {
                "_compiled_call_impl": None,
                "_forward_pre_hooks": {},
                "_forward_hooks": {},
            }
            if checkpointed:
                replaced["_gradient_checkpointing_func"] = _called
            with (
                mock.patch.multiple(self._module, **replaced),
                mock.patch("trainer.build.checkpoint", _called),
            ):
                return torch.func.functional_call(self._module, state, args, kwargs)

        def planned(graph: fx.GraphModule, _: object) -> Any:
            return compile_.make_boxed_func(_Plan(graph, self._tape).run)

        function = compile_.aot_function(
            whole,
            fw_compiler=planned,
            bw_compiler=planned,
            partition_fn=functools.partial(_partition, checkpointed=checkpointed),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

        def called(*inputs: torch.Tensor) -> Any:
            with self._tape.paused():
                return function(*inputs)

        return called


class _Plan:
    """The graph of one forward or backward; values that are in memory are recorded."""

    def __init__(self, graph: fx.GraphModule, tape: AllocationRecorder) -> None:
        self._tape, self._attributes, self._nodes = tape, graph, list(graph.graph.nodes)
        self._stored = self._in_memory()
        self._last = self._last_readers()
        self._reused = self._reuses()
        self._kernels = Counter(
            kernels_of(self._nodes, self._stored, _library_call, tape.kernels)
        )

    def _in_memory(self) -> set[fx.Node]:
        from torch._inductor import config

        found = {
            node for node in self._nodes if _is_library(node) or waits_for_all(node)
        }
        # Into an argument.
        found |= {node for node in self._nodes if node.target is aten.copy_.default}
        for node in self._nodes:
            if node.op == "output" or _is_library(node):
                found |= {_base(one) for one in node.all_input_nodes}
        reads: dict[fx.Node, set[fx.Node]] = {}
        self._reducing: set[fx.Node] = set()
        """Values computed by a kernel that also reduces."""
        for node in self._nodes:
            reads[node] = set().union(*(reads[one] for one in node.all_input_nodes))
            # A value that several operations read is computed once if it reads much
            # itself.
            if (
                len(reads[node]) > config.realize_reads_threshold
                and len(node.users) > 1
                and _base(node) is node
            ):
                found.add(node)
            before = [one for one in node.all_input_nodes if one not in found]
            if _is_reduction(node) or any(one in self._reducing for one in before):
                self._reducing.add(node)
            if node in found or node.op != "call_function" or _is_read(node):
                reads[node] = {node}
        return {node for node in found if node.op == "call_function"}

    def _reuses(self) -> dict[fx.Node, fx.Node]:
        """Return the earlier values over which later ones of the same size and type are written, by the later one.

        A pointwise kernel writes over its inputs, and any kernel over values that the
        one before was last to read.
        """
        free: dict[Any, list[tuple[int, fx.Node]]] = {}
        reused: dict[fx.Node, fx.Node] = {}
        given = {_base(one) for one in self._nodes[-1].all_input_nodes}
        kernel, fuses = 0, False
        for node in self._nodes:
            dying = [
                one
                for one in self._last.get(node, ())
                if one in self._stored - given and _place(one)
            ]
            if node in self._stored:
                # Copies of weights are not waited for.
                if _is_library(node) or any(
                    one.op != "placeholder" for one in node.all_input_nodes
                ):
                    kernel += _is_library(node) or not fuses
                    fuses = not _is_library(node)
                if (
                    node.users
                    and _place(node)
                    and not _allocates(node)
                    and not isinstance(node.meta["val"], tuple)
                ):
                    alike = fuses and node not in self._reducing
                    over = [
                        one for one in dying if alike and _place(one) == _place(node)
                    ]
                    over += [
                        one
                        for number, one in free.get(_place(node), [])
                        if number == kernel - 1
                    ][-1:]
                    if over:
                        reused[node] = over[0]
                        dying = [one for one in dying if one is not over[0]]
                        free[_place(node)] = [
                            one
                            for one in free.get(_place(node), [])
                            if one[1] is not over[0]
                        ]
            for one in dying:
                free.setdefault(_place(one), []).append((kernel, one))
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
        self._tape.kernels.counts.update(self._kernels)
        with self._tape.paused():
            for node in self._nodes:
                if node.op == "placeholder":
                    values[node] = next(rest)
                elif node.op == "get_attr":
                    values[node] = getattr(self._attributes, str(node.target))
                elif node.op == "output":
                    return fx.node.map_arg(node.args[0], values.__getitem__)
                else:
                    args, kwargs = (
                        fx.node.map_arg(given, values.__getitem__)
                        for given in (node.args, node.kwargs)
                    )
                    with self._tape.requested(
                        node.target if _is_library(node) else None, args, kwargs
                    ):
                        values[node] = _computed(node, args, kwargs)
                        if node in self._reused:
                            earlier = self._reused[node]
                            over = kept.pop(earlier)
                            over = _first(values[earlier]) if over is None else over
                            values[node] = over.as_strided(
                                values[node].size(), values[node].stride()
                            )
                            del over
                        elif node in self._stored:
                            self._tape.keep(values[node])
                    del args, kwargs
                for one in self._last.get(node, ()):
                    if one in kept:
                        kept[one] = _first(values[one])
                    del values[one]
        raise AssertionError("a graph without an output")


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
        drawn = (
            checkpointed or COMPILER_SAVES_COMPACT
        ) and node.target is aten.rand.default
        forward = (
            node.op == "call_function"
            and node.meta.get("partitioner_tag") != "is_backward"
        )
        if forward and (
            checkpointed
            or drawn
            or any(_SEEDED in one.meta for one in node.all_input_nodes)
        ):
            node.meta |= {
                "recompute": CheckpointPolicy.PREFER_RECOMPUTE,
                "ac_graph_id": 0,
            }
        if drawn:  # again from a seed, within the kernel that uses it
            node.target, node.args = aten.full.default, (*node.args, 0.0)
            node.meta[_SEEDED] = True
    return min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", **options
    )


def _called(function: Callable[..., Any], *args: Any, **_: object) -> Any:
    return function(*args)


def _opened(value: Any) -> Any:
    """Return a dataclass instance as a dictionary, so that the tensors in it are found.

    Anything else unchanged.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {
        _CLASS: type(value),
        **{one.name: getattr(value, one.name) for one in fields(value)},
    }


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _is_read(node: fx.Node) -> bool:
    """Return whether users read a small value from memory: a seed, a mean or a variance."""
    of = node.args[0] if node.target is operator.getitem else node
    return _SEEDED in node.meta or (isinstance(of, fx.Node) and _is_reduction(of))


def _is_reduction(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _REDUCTIONS


def _place(node: fx.Node) -> Any:
    """Return the size and type of a node's first result.

    None if it is no tensor, or of unknown size.
    """
    value = _first(node.meta.get("val"))
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return None
    return value.numel(), value.dtype


def _allocates(node: fx.Node) -> bool:
    """Return whether a library allocates its results itself.

    Matmuls write into a given block.
    """
    return _is_library(node) and (
        _operator(node).namespace != "aten" or "attention" in str(node.target)
    )


def _operator(node: fx.Node) -> Any:
    """Return the operator that a node calls, also inside a wrapper that saves the random state."""
    wrapped = _WRAPPED.get(node.target)
    return node.target if wrapped is None else node.args[wrapped]


def _library_call(node: fx.Node) -> tuple[Any, Any] | None:
    """Return the operator and the arguments of a call of a library.

    None for other nodes.
    """
    if not _is_library(node):
        return None
    return _operator(node), (
        node.args[_WRAPPED[node.target] + 1 :] if node.target in _WRAPPED else node.args
    )


def _computed(node: fx.Node, args: Any, kwargs: Any) -> Any:
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

    Equal for modules that differ only in their index.
    """

    def settings(part: nn.Module) -> tuple[Any, ...]:
        plain = (
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, int | float | str | tuple)
        )
        return tuple(
            (key, value)
            for key, value in plain
            if not key.startswith(("_", "layer_idx"))
        )

    parts = () if module is None else module.named_modules()
    return tuple(
        (name, type(part), part.training, "forward" in vars(part), settings(part))
        for name, part in parts
    )


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad
