"""Events of memory in a profile, each with its position in the step.

PyTorch's allocators report each allocation to the profiler: on CUDA with the block's
size and the memory given out, as ``torch.cuda.max_memory_allocated`` counts it. The
profiler also knows the operator and the node of autograd that allocate. A node has the
sequence number of its operator in forward, which leads to the module.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autotune.evidence.peak_contents import NO_MODULE, ContentKind, Phase
from autotune.memory.decide.peak_contents import (
    Allocated,
    BackwardReached,
    Event,
    Label,
    Labelled,
    Position,
    RecomputationEnded,
    Refused,
    Released,
)

MARK = "autotune::mark "
"""Beginning of the names of events that stand for a ``Mark``, before its number."""
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER_STEP = "Optimizer.step#"
_OPERATOR = "aten::"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
"""Beginnings of the names of compiled code."""
_COMPILED_GRAPH = "compiled graph"
_KINDS_OF_RANGES = {
    "FSDP::all_gather": ContentKind.PARAMETERS,
    "FSDP::pre_forward": ContentKind.PARAMETERS,
    "FSDP::pre_backward": ContentKind.PARAMETERS,
    "FSDP::post_backward_reduce": ContentKind.GRADIENTS,
}
"""Kind of all allocations in ranges whose names begin so."""
_MAKES_NOTHING = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
    }
)
"""Operators that allocate for others, which say more."""
_LEAST_SHOWN_BYTES = 2**10
"""Size from which an allocation's shape is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Observation of a hook at a moment of the step."""

    kind: Literal["enter", "leave", "seen"]
    """``enter`` and ``leave``: a module is called, and returns."""
    module: str = NO_MODULE
    """Name of that module."""
    events: tuple[Event, ...] = ()
    """Labels of tensors, and releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Module, operator and phase that enclose an event of a profile."""

    node_module: str | None = None
    """Module of the node of autograd; None outside of backward."""
    calls_before: int = 0
    """Calls of modules around that node."""
    in_optimizer: bool = False
    """True within a step of an optimizer."""
    needs_gradient: bool = False
    """True within an operator that autograd records."""
    operator: str | None = None
    operator_call: int = -1
    label: Label | None = None
    """Label of all allocations within; None if they differ."""
    fields: Any = None
    """The profiler's fields of the operator."""

    @property
    def is_backward(self) -> bool:
        return self.node_module is not None


@dataclass(slots=True)
class EventReader:
    """Reader of the events of memory in a profile.

    Args:
        device: Device whose memory is read.
        marks: Marks by their number.
    """

    device: torch.device
    marks: Sequence[Mark]
    is_compiled: bool = field(default=False, init=False)
    """True if compiled code ran."""
    _timed: list[tuple[int, Event]] = field(default_factory=list, init=False)
    _calls: dict[int, list[str]] = field(default_factory=dict, init=False)
    """Modules that are being called, by thread, the innermost last."""
    _module_of_node: dict[int, str] = field(default_factory=dict, init=False)
    """Module in forward, by sequence number."""
    _last_node_module: str = field(default=NO_MODULE, init=False)
    _without_shape: dict[int, int] = field(default_factory=dict, init=False)
    """Bytes of allocations without a shape, by address."""
    _operator_calls: int = field(default=0, init=False)

    def read(self, roots: Iterable[Any]) -> list[Event]:
        """Return all events in the order of time.

        Args:
            roots: Roots of the profiler's event tree, of all threads.
        """
        for root in sorted(roots, key=lambda event: int(event.start_time_ns)):
            for event, scope in self._walk(root):
                self._read_event(event, scope)
        # Threads take turns; the order of each thread's own events stays.
        self._timed.sort(key=lambda timed: timed[0])
        return [event for _, event in self._timed]

    def _walk(self, root: Any) -> Iterator[tuple[Any, _Scope]]:
        """Yield an event and all events within it, each with what encloses it."""
        pending = [(root, _Scope())]
        while pending:
            event, scope = pending.pop()
            yield event, scope
            children = event.children
            if children:
                inner = self._scope_within(event, scope)
                pending += [(child, inner) for child in reversed(children)]

    def _scope_within(self, event: Any, scope: _Scope) -> _Scope:
        """Return the scope of the events within an event."""
        name = event.name
        if name.startswith(_NODE):
            return replace(
                scope,
                node_module=self._last_node_module,
                calls_before=len(self._calls_of(event)),
                operator=name.removeprefix(_NODE),
                needs_gradient=False,
                fields=None,
            )
        if name.startswith(_OPTIMIZER_STEP):
            return replace(scope, in_optimizer=True)
        operator = None
        if name.startswith(_OPERATOR):
            operator = name.removeprefix(_OPERATOR)
        elif name.startswith(_COMPILED):
            operator = _COMPILED_GRAPH
        label = _label_of_range(name)
        if label is not None:
            return replace(scope, label=label)
        if operator is None:
            return scope
        if operator in _MAKES_NOTHING and scope.operator is not None:
            return scope
        operator_call = scope.operator_call
        if operator_call < 0:
            self._operator_calls += 1
            operator_call = self._operator_calls
        return replace(
            scope,
            operator=operator,
            operator_call=operator_call,
            needs_gradient=scope.needs_gradient or _sequence_number(event) >= 0,
            fields=event.extra_fields,
        )

    def _read_event(self, event: Any, scope: _Scope) -> None:
        fields = event.extra_fields
        # The class of an event out of memory has no public name.
        match type(fields).__name__:
            case "_ExtraFields_Allocation":
                self._read_allocation(event, fields, scope)
            case "_ExtraFields_OutOfMemory":
                refused = Refused(
                    position=self._position(event, scope),
                    input_shapes=_input_shapes(scope.fields),
                )
                self._timed.append((event.start_time_ns, refused))
            case "_ExtraFields_TorchOp":
                self._read_operator(event, fields, scope)

    def _read_allocation(self, event: Any, fields: Any, scope: _Scope) -> None:
        device = fields.device
        is_other = device.type != self.device.type or (
            device.type == "cuda" and device.index != self.device.index
        )
        if is_other:
            return
        on_gpu = device.type == "cuda"
        # The figures of a CPU begin with the first profile.
        total_bytes = fields.total_allocated if on_gpu else None
        reserved_bytes = fields.total_reserved if on_gpu else None
        size_bytes = fields.alloc_size
        self._without_shape.pop(fields.ptr, None)
        memory_event: Event
        if size_bytes < 0:
            memory_event = Released(
                address=fields.ptr,
                total_bytes=total_bytes,
                reserved_bytes=reserved_bytes,
            )
        else:
            memory_event = Allocated(
                address=fields.ptr,
                size_bytes=size_bytes,
                position=self._position(event, scope),
                total_bytes=total_bytes,
                reserved_bytes=reserved_bytes,
            )
            if size_bytes >= _LEAST_SHOWN_BYTES:
                self._without_shape[fields.ptr] = size_bytes
        self._timed.append((event.start_time_ns, memory_event))
        if size_bytes > 0 and scope.label is not None:
            labelled = Labelled(address=fields.ptr, label=scope.label)
            self._timed.append((event.start_time_ns, labelled))

    def _read_operator(self, event: Any, fields: Any, scope: _Scope) -> None:
        name = event.name
        if name.startswith(MARK):
            mark = self.marks[int(name.removeprefix(MARK))]
            self._read_mark(event, mark, scope)
            return
        if name.startswith(_NODE):
            sequence_number = _sequence_number(event)
            self._last_node_module = self._module_of_node.get(
                sequence_number, self._last_node_module
            )
            self._timed.append((event.start_time_ns, BackwardReached()))
            return
        if name.startswith(_COMPILED):
            self.is_compiled = True
        is_recorded = _sequence_number(event) >= 0
        if is_recorded and not scope.is_backward:
            self._module_of_node[_sequence_number(event)] = self._innermost(event)
        if self._without_shape:
            self._read_shapes(event, fields)

    def _read_mark(self, event: Any, mark: Mark, scope: _Scope) -> None:
        calls = self._calls_of(event)
        self._timed += [(event.start_time_ns, seen) for seen in mark.events]
        if mark.kind == "enter":
            calls.append(mark.module)
        elif mark.kind == "leave" and len(calls) > scope.calls_before:
            calls.pop()
            if scope.is_backward and len(calls) == scope.calls_before:
                self._timed.append((event.start_time_ns, RecomputationEnded()))

    def _read_shapes(self, event: Any, fields: Any) -> None:
        """Label allocations with the shapes of an operator's inputs."""
        for tensor in _tensors_of(fields):
            address = tensor.storage_data_ptr
            size_bytes = self._without_shape.get(address)
            if size_bytes is None:
                continue
            label = self._shape_label(tensor, size_bytes)
            if label is not None:
                del self._without_shape[address]
                labelled = Labelled(address=address, label=label)
                self._timed.append((event.start_time_ns, labelled))

    def _shape_label(self, tensor: Any, size_bytes: int) -> Label | None:
        """Return a tensor's shape if the tensor takes all of an allocation."""
        dtype = tensor.dtype
        if not isinstance(dtype, torch.dtype):
            return None
        used_bytes = dtype.itemsize * math.prod(tensor.sizes)
        most_unused_bytes = 0
        if self.device.type == "cuda":
            most_unused_bytes = _most_unused_bytes(size_bytes)
        if not 0 <= size_bytes - used_bytes <= most_unused_bytes:
            return None
        return Label(shape=tuple(tensor.sizes), dtype=str(dtype).removeprefix("torch."))

    def _position(self, event: Any, scope: _Scope) -> Position:
        calls = self._calls_of(event)
        is_called = len(calls) > scope.calls_before
        module = calls[-1] if is_called else NO_MODULE
        phase: Phase = "other"
        if scope.is_backward:
            phase = "backward"
            if not is_called:
                module = scope.node_module or NO_MODULE
        elif is_called or scope.needs_gradient:
            phase = "forward"
        elif scope.in_optimizer:
            phase = "optimizer step"
        return Position(
            phase=phase,
            module=module,
            operator=scope.operator,
            operator_call=scope.operator_call,
            is_recomputation=scope.is_backward and is_called,
        )

    def _calls_of(self, event: Any) -> list[str]:
        return self._calls.setdefault(event.start_tid, [])

    def _innermost(self, event: Any) -> str:
        calls = self._calls_of(event)
        return calls[-1] if calls else NO_MODULE


def _label_of_range(name: str) -> Label | None:
    """Return the label of all allocations in a range of FSDP.

    Its name ends in that of the module: ``FSDP::all_gather (layers.3)``.
    """
    for start, kind in _KINDS_OF_RANGES.items():
        if name.startswith(start):
            module = name.partition("(")[2].removesuffix(")")
            return Label(kind=kind, module=module or None)
    return None


def _sequence_number(event: Any) -> int:
    """Return the number that links an operator with its node; -1 without one."""
    return int(getattr(event.extra_fields, "sequence_number", -1))


def _tensors_of(fields: Any) -> Iterator[Any]:
    """Yield the tensors that an operator is called with."""
    for value in fields.inputs:
        values = value if isinstance(value, list) else [value]
        for tensor in values:
            if hasattr(tensor, "storage_data_ptr"):
                yield tensor


def _input_shapes(fields: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors that an operator is called with."""
    if fields is None:
        return ()
    return tuple(tuple(tensor.sizes) for tensor in _tensors_of(fields))


def _most_unused_bytes(block_bytes: int) -> int:
    """Return how much of a block CUDA's caching allocator may leave unused."""
    return 2**20 if block_bytes > 2**20 else 512
