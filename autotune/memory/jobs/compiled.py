"""Allocations of compiled functions.

AOTAutograd's graphs are run on the meta device, and fused as Inductor fuses them.
``torch.compile`` decides from the graph alone which activations are saved for backward
and which are recomputed; torch makes that decision here too, without a compiler. Only
the generated kernels are assumed: see ``graph_plan``.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.call_form import CallForm
from autotune.memory.jobs.graph_partition import partition
from autotune.memory.jobs.graph_plan import GraphPlan
from autotune.memory.values import Term, activations_of

Graphs = dict[Any, Callable[..., Any]]
"""Functions that run graphs, by a key of everything on which the graph depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCompiler:
    """A compiler of a trainer's layers and functions, in place of ``torch.compile``."""

    recorder: AllocationRecorder
    """Recorder of the allocations."""
    redraws_dropout: bool
    """True if compiled code keeps the seed of dropout for backward, not its mask."""
    checkpoint: str
    """Full name of the function with which layers checkpoint activations; within
    compiled code, it is replaced by a plain call."""
    graphs: Graphs = field(default_factory=dict)
    """Graphs so far, which equivalent functions share. Calls add to it."""

    def compile(self, function: Callable[..., Any]) -> "CompiledFunction":
        """Return the compiled form of a function of its arguments alone."""
        return CompiledFunction(function, None, self)

    def compile_layers(self, layers: Sequence[nn.Module]) -> None:
        """Compile layers in place; those that differ only in their index share a graph.

        ``nn.Module.compile`` sets the same private attribute, and nothing public does.
        """
        for layer in layers:
            layer._compiled_call_impl = CompiledFunction(layer, layer, self)


class CompiledFunction:
    """A function as ``torch.compile`` would run it.

    Args:
        function: Function to compile.
        module: Module whose tensors the function uses; None for a function of its
            arguments alone.
        compiler: Compiler of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        compiler: TracedCompiler,
    ) -> None:
        self._function = function
        self._module = module
        self._compiler = compiler
        self._recorder = compiler.recorder
        self._graphs = compiler.graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and the module's hooks around it.

        ``torch.compile`` of a module does not compile its hooks.
        """
        module = self._module
        if module is None:
            return self._run({}, args, kwargs)
        for before in module._forward_pre_hooks.values():
            changed_args = before(module, args)
            if changed_args is not None:
                args = changed_args
        result = self._run(_tensors_of(module), args, kwargs)
        for after in module._forward_hooks.values():
            after(module, args, result)
        return result

    def _run(
        self,
        state: dict[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the graph of a call, which the first call of its kind makes.

        Args:
            state: Tensors of the module, by name.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        form, tensors = CallForm.of(state, args, kwargs)
        inputs = [*state.values(), *tensors]
        key = (
            _module_key(self._module),
            str(form.leaves),
            str(form.structure),
            torch.is_grad_enabled(),
            *map(_tensor_key, inputs),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._make_graph(form)
            self._graphs[key] = graph
        owner = self._recorder.owner
        # Backward owns temporaries already.
        if self._module is not None and owner != Term.TEMPORARIES:
            owner = activations_of(self._module)
        with self._recorder.owned_by(owner):
            return graph(*inputs)

    def _make_graph(self, form: CallForm) -> Callable[..., Any]:
        """Return a function of all inputs of a call, with the graphs of both passes."""
        # Imported late, as both are slow to import and only traces of compiled layers
        # need them. The first has no type annotations.
        functorch: Any = importlib.import_module("functorch.compile")
        from torch._inductor.decomposition import select_decomp_table

        checkpointed = _checkpoints_in_forward(self._module)

        def plan_graph(graph: fx.GraphModule, _example_inputs: object) -> Any:
            return functorch.make_boxed_func(GraphPlan(graph, self._recorder).run)

        function = functorch.aot_function(
            functools.partial(self._call_eagerly, form, checkpointed=checkpointed),
            fw_compiler=plan_graph,
            bw_compiler=plan_graph,
            partition_fn=functools.partial(
                partition,
                checkpointed=checkpointed,
                redraws_dropout=self._compiler.redraws_dropout,
            ),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

        def run_unrecorded(*inputs: torch.Tensor) -> Any:
            # A plan records the values that are in memory, and nothing else is.
            with self._recorder.paused():
                return function(*inputs)

        return run_unrecorded

    def _call_eagerly(
        self, form: CallForm, *inputs: torch.Tensor, checkpointed: bool
    ) -> Any:
        """Call the function without hooks on all inputs of a call.

        AOTAutograd does so to find its graph.
        """
        state = form.state_of(inputs)
        args, kwargs = form.arguments_of(inputs)
        if self._module is None:
            return self._function(*args, **kwargs)
        replaced: dict[str, Any] = {
            "_compiled_call_impl": None,
            "_forward_pre_hooks": {},
            "_forward_hooks": {},
        }
        # ``__call__`` would call this object again, and the hooks a second time. The
        # module is called by several callers, so its attributes are patched for one
        # call only. Dynamo marks checkpointed parts instead of tracing their
        # recomputation.
        if checkpointed:
            replaced["_gradient_checkpointing_func"] = _call_without_checkpointing
        with (
            mock.patch.multiple(self._module, **replaced),
            mock.patch(self._compiler.checkpoint, _call_without_checkpointing),
        ):
            return torch.func.functional_call(self._module, state, args, kwargs)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and other tensors of a module, by name.

    Other tensors change with every micro-batch, such as the seeds of dropout.
    """
    others = {
        f"{name}.{key}" if name else key: value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }
    return dict(module.named_parameters()) | dict(module.named_buffers()) | others


def _checkpoints_in_forward(module: nn.Module | None) -> bool:
    """Return whether a module's forward checkpoints activations.

    Layers of older transformers do so in ``__call__`` instead, outside of the compiled
    function, in training as in a trace.
    """
    return (
        module is not None
        and module.training
        and bool(getattr(module, "gradient_checkpointing", False))
        and type(module).__call__ is nn.Module.__call__
    )


def _call_without_checkpointing(
    function: Callable[..., Any], *args: Any, **_: object
) -> Any:
    """Call a function in place of ``torch.utils.checkpoint.checkpoint``."""
    return function(*args)


def _module_key(module: nn.Module | None) -> tuple[Any, ...]:
    """Return a key of a module's structure and settings.

    It is equal for modules with the same graph on equal tensors, such as layers that
    differ only in their index.
    """
    if module is None:
        return ()
    return tuple(
        (name, type(part), part.training, "forward" in vars(part), _settings(part))
        for name, part in module.named_modules()
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings of a module, without private ones and its index."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple)
        and not name.startswith(("_", "layer_idx"))
    )


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of everything about a tensor on which a graph depends."""
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad
