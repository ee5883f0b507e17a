"""Recording of what memory consists of at the peak of any training step.

Nothing of the step is changed: PyTorch's allocators report to the profiler, which knows
the operator, and hooks of modules and optimizers only look. CUDA's caching allocator
also has a snapshot of what was allocated before, and a history of all threads. So the
peak is the peak without recording, compiled code included.
"""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_leaves

from autotune.evidence.peak_contents import ContentKind, PeakContents
from autotune.memory.decide.allocator_history import HistoryEntry, complete_events
from autotune.memory.decide.peak_contents import (
    Event,
    Held,
    Label,
    Labelled,
    Released,
    StepBegan,
    StepEnded,
    StepLog,
    contents_at_peak,
)
from autotune.memory.jobs.model_parts import (
    ModuleNames,
    ProgramParts,
    find_parts,
    plain_tensors,
    unwrap,
)
from autotune.memory.jobs.profiled_events import MARK, EventReader, Mark

_MAX_ENTRIES = 2**20
"""Most entries of the history of CUDA's allocator; later ones overwrite the first."""
_REFUSED_ON_CPU = re.compile(r"tried to allocate (\d+) bytes")


def record_step(
    step: Callable[[], object],
    device: torch.device,
    *,
    modules: Sequence[nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
) -> PeakContents:
    """Take one optimizer step, and return what memory consisted of at its peak.

    If the step runs out of memory, the contents are those of that moment, and the error
    is not raised. Take a step before: the first one allocates the optimizer's state.

    Args:
        step: Function that takes one optimizer step.
        device: Device whose memory is recorded.
        modules: Models of the step; None finds those that exist.
        optimizers: Its optimizers; None finds those that exist.

    Raises:
        RuntimeError: If another profiler is running, or another error of the step.
    """
    # Imported here, as the trainer's errors import much.
    from trainer.runtime.out_of_memory import out_of_memory

    recorder = StepRecorder(device, modules=modules, optimizers=optimizers)
    recorder.begin_step()
    try:
        step()
    except Exception as error:
        if out_of_memory(error) is None:
            recorder.close()
            raise
        return recorder.contents(error)
    recorder.end_step()
    return recorder.contents()


class StepRecorder:
    """Recorder of all allocations on one device, from the first step that begins.

    The contents are those of the last step. Steps may begin and end within hooks of an
    optimizer: the profiler runs from the first step to ``close``, as it must not stop
    within a range that it profiles, such as an optimizer's step.

    Args:
        device: Device whose memory is recorded.
        modules: Models of the step; None finds those that exist when a step begins.
        optimizers: Its optimizers; None finds those that exist when a step begins.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        modules: Sequence[nn.Module] | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._modules = modules
        self._optimizers = optimizers
        self._recording: _Recording | None = None

    def begin_step(self) -> None:
        """Begin a step; steps before it are forgotten.

        Raises:
            RuntimeError: If another profiler is running.
        """
        parts = find_parts()
        if self._modules is not None:
            parts = replace(parts, modules=tuple(self._modules))
        if self._optimizers is not None:
            parts = replace(parts, optimizers=tuple(self._optimizers))
        if self._recording is None:
            autograd: Any = torch.autograd  # no public function tells this
            if autograd._profiler_enabled():
                raise RuntimeError(
                    "another profiler is running, and there can be only one"
                )
            self._recording = _Recording(self._device, parts.tensors)
        self._recording.begin_step(parts)

    def end_step(self) -> None:
        """End the step that has begun."""
        if self._recording is not None:
            self._recording.end_step()

    def close(self) -> None:
        """Stop recording, and remove all hooks."""
        if self._recording is not None:
            self._recording.close()

    def contents(self, out_of_memory: BaseException | None = None) -> PeakContents:
        """Stop recording, and return the contents of memory at the last step's peak.

        Args:
            out_of_memory: Error of the refused allocation that ended the step: the
                contents are those of that moment. None if the step completed.

        Raises:
            RuntimeError: If no step has begun.
        """
        if self._recording is None:
            raise RuntimeError("no step was recorded")
        self._recording.close()
        log = self._recording.log(out_of_memory)
        return contents_at_peak(log, self._device.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenTensor:
    """A tensor with memory of the recorded device."""

    address: int
    size_bytes: int
    """Size of its storage."""
    storage: torch.UntypedStorage
    label: Label


class _Recording:
    """One run of the profiler, which begins when this object is made."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        """Start the profiler.

        Args:
            device: Device whose memory is recorded.
            tensors: All tensors that exist.
        """
        self._device = device
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._names = ModuleNames()
        self._marks: list[Mark] = []
        self._calls = 0
        """Calls of modules that have not returned."""
        self._watched_calls: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules whose calls are watched one by one."""
        self._parameter_addresses: set[int] = set()
        seen = list(self._seen(tensors, ContentKind.OTHER))
        self._held = _held_memory(device, seen)
        self._released = self._watch_storages(seen)
        self._hooks = contextlib.ExitStack()
        self._labels_after: list[Labelled] = []
        self._history: list[HistoryEntry] = []
        self._refused_bytes: int | None = None
        self._is_closed = False
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
        )
        self._profiler.start()
        if device.type == "cuda":
            # Of all threads, also those that the profiler does not follow.
            torch.cuda.memory._record_memory_history(
                "all",
                context=None,
                max_entries=_MAX_ENTRIES,
                clear_history=True,
            )
        for hook in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._see_optimizer),
            register_optimizer_step_post_hook(self._see_optimizer),
        ):
            self._hooks.enter_context(hook)

    def begin_step(self, parts: ProgramParts) -> None:
        """Mark the beginning of a step, and label what models and optimizers own."""
        self._optimizers.update(parts.optimizers)
        for model in parts.modules:
            self._names.add(model)
            # A model is often called by another module, such as Lightning's.
            for module in (model, *_parts_called(model)):
                self._see_keywords(module)
        for module in self._names.modules():
            self._see_compiled_calls(module)
        owned = list(self._owned_tensors())
        self._parameter_addresses |= {seen.address for seen in owned}
        self._mark(Mark(kind="seen", events=(*_labels(owned), StepBegan())))

    def end_step(self) -> None:
        """Mark the end of a step."""
        labels = _labels(self._owned_tensors())
        self._mark(Mark(kind="seen", events=(*labels, StepEnded())))

    def close(self) -> None:
        """Stop the profiler and the allocator's history, and remove all hooks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hooks.close()
        self._released.clear()
        self._labels_after = list(_labels(self._owned_tensors()))
        if self._device.type == "cuda":
            snapshot = torch.cuda.memory._snapshot(self._device)
            torch.cuda.memory._record_memory_history(None)
            entries = snapshot["device_traces"][self._device.index]
            self._history, self._refused_bytes = _read_history(entries)
        self._profiler.stop()

    def log(self, out_of_memory: BaseException | None) -> StepLog:
        """Return all allocations of the recording, with their labels.

        Args:
            out_of_memory: Error that ended the step, if it ran out of memory.
        """
        refused_bytes = self._refused_bytes
        if out_of_memory is not None and refused_bytes is None:
            refused_bytes = _refused_bytes_on_cpu(out_of_memory)
        reader = EventReader(self._device, self._marks)
        profiler: Any = self._profiler.profiler
        results = profiler.kineto_results
        events = reader.read(results.experimental_event_tree())
        events = complete_events(events, self._history)
        return StepLog(
            held=self._held,
            events=[*events, *self._labels_after],
            classes=self._names.classes,
            ran_out_of_memory=out_of_memory is not None,
            refused_bytes=refused_bytes,
            is_compiled=reader.is_compiled,
        )

    def _see_keywords(self, module: nn.Module) -> None:
        """See the keyword arguments of a module, which general hooks do not get."""
        if module not in self._watched_calls:
            self._watched_calls.add(module)
            hook = module.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
            self._hooks.enter_context(hook)

    def _mark(self, mark: Mark) -> None:
        """Put a mark into the profile."""
        self._marks.append(mark)
        with _RecordFunctionFast(f"{MARK}{len(self._marks) - 1}"):
            pass

    def _see_compiled_calls(self, module: nn.Module) -> None:
        """Mark the calls of a module that was compiled in place; no hook sees them."""
        compiled = module._compiled_call_impl
        if compiled is None or module in self._watched_calls:
            return
        self._watched_calls.add(module)

        def call(*arguments: Any, **keywords: Any) -> Any:
            # True if the caller is being compiled, too.
            if torch.compiler.is_compiling():
                return compiled(*arguments, **keywords)
            self._begin_call(module, (arguments, keywords))
            result = None
            try:
                result = compiled(*arguments, **keywords)
            finally:
                self._end_call(module, result)
            return result

        module._compiled_call_impl = call
        self._hooks.callback(setattr, module, "_compiled_call_impl", compiled)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if self._is_seen(module):
            self._begin_call(module, arguments)

    def _see_inputs(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        # The call has begun, as general hooks come first.
        if not torch.compiler.is_compiling() and self._calls == 1:
            labels = self._labels_of_inputs((arguments, keywords))
            self._mark(Mark(kind="seen", events=labels))

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._is_seen(module):
            self._end_call(module, result)

    def _is_seen(self, module: nn.Module) -> bool:
        """Return whether the calls of a module are marked.

        Graphs that compilers make belong to the module that was compiled.
        """
        # Compiled code would contain the hook.
        if torch.compiler.is_compiling():
            return False
        return not isinstance(module, torch.fx.GraphModule) or module in self._names

    def _begin_call(self, module: nn.Module, arguments: Any) -> None:
        labels = () if self._calls else self._labels_of_inputs(arguments)
        self._calls += 1
        name = self._names.name_of(module)
        self._mark(Mark(kind="enter", module=name, events=labels))

    def _end_call(self, module: nn.Module, result: Any) -> None:
        self._calls -= 1
        name = self._names.name_of(module)
        results = self._seen(tree_leaves(result), None)
        # FSDP gathers parameters for the call.
        parameters = self._seen(
            module._parameters.values(), ContentKind.PARAMETERS, name
        )
        gathered = (
            seen for seen in parameters if seen.address not in self._parameter_addresses
        )
        labels = (*_labels(results), *_labels(gathered))
        self._mark(Mark(kind="leave", module=name, events=labels))

    def _labels_of_inputs(self, values: Any) -> tuple[Event, ...]:
        """Return the labels of the tensors that a model is called with."""
        # Backward calls modules with their own activations, to compute them again.
        if torch._C._current_graph_task_id() >= 0:
            return ()
        inputs = [
            value
            for value in tree_leaves(values)
            if isinstance(value, torch.Tensor) and value.grad_fn is None
        ]
        return _labels(self._seen(inputs, ContentKind.INPUTS))

    def _see_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Label the tensors of an optimizer, before and after its step."""
        self._optimizers.add(optimizer)
        labels = _labels(self._tensors_of_optimizer(optimizer))
        self._mark(Mark(kind="seen", events=labels))

    def _seen(
        self,
        values: Iterable[Any],
        kind: ContentKind | None,
        module: str | None = None,
    ) -> Iterator[_SeenTensor]:
        """Yield the tensors on the recorded device in some values."""
        for value in values:
            for tensor in plain_tensors(value):
                seen = _seen_tensor(tensor, kind, module)
                if seen is not None and tensor.device == self._device:
                    yield seen

    def _owned_tensors(self) -> Iterator[_SeenTensor]:
        """Yield parameters, gradients and the states of optimizers."""
        for tensor, module in self._names.owned_tensors():
            yield from self._seen([tensor], ContentKind.PARAMETERS, module)
            if tensor.is_leaf:
                yield from self._seen([tensor.grad], ContentKind.GRADIENTS, module)
        for optimizer in self._optimizers:
            yield from self._tensors_of_optimizer(optimizer)

    def _tensors_of_optimizer(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[_SeenTensor]:
        """Yield the parameters of an optimizer, their gradients and states."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                module = self._names.owner_of(parameter)
                yield from self._seen([parameter], ContentKind.PARAMETERS, module)
                yield from self._seen([parameter.grad], ContentKind.GRADIENTS, module)
                state = optimizer.state.get(parameter, {})
                yield from self._seen(
                    tree_leaves(state), ContentKind.OPTIMIZER_STATE, module
                )

    def _watch_storages(
        self, tensors: Sequence[_SeenTensor]
    ) -> list[weakref.ref[torch.UntypedStorage]]:
        """Mark the release of storages on a CPU.

        The profiler knows only what was allocated while it ran.

        Returns:
            References that must be kept until recording ends.
        """
        if self._device.type == "cuda":
            return []
        storages = {seen.address: seen.storage for seen in tensors}
        return [
            weakref.ref(storage, functools.partial(self._mark_release, address))
            for address, storage in storages.items()
        ]

    def _mark_release(self, address: int, _: object) -> None:
        self._mark(Mark(kind="seen", events=(Released(address=address),)))


def _labels(tensors: Iterable[_SeenTensor]) -> tuple[Labelled, ...]:
    """Return the labels of tensors at their addresses."""
    return tuple(Labelled(address=seen.address, label=seen.label) for seen in tensors)


def _parts_called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct parts of a model that its owner may call in its place."""
    if type(unwrap(model)) is type(model) and model._compiled_call_impl is None:
        yield from model.children()


def _seen_tensor(
    tensor: torch.Tensor, kind: ContentKind | None, module: str | None
) -> _SeenTensor | None:
    """Return a tensor with its label; None if it has no memory."""
    # Tensors of functional transforms have no storage.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        address = storage.data_ptr()
        if not address or not size_bytes:
            return None
        is_whole = tensor.nbytes == size_bytes
        label = Label(
            kind=kind,
            module=module,
            shape=tuple(tensor.shape) if is_whole else None,
            dtype=str(tensor.dtype).removeprefix("torch.") if is_whole else None,
        )
        return _SeenTensor(
            address=address, size_bytes=size_bytes, storage=storage, label=label
        )
    return None


def _held_memory(
    device: torch.device, tensors: Sequence[_SeenTensor]
) -> Mapping[int, Held]:
    """Return all memory that is allocated on the device.

    Args:
        device: A CPU, where only tensors are known, or a GPU.
        tensors: Tensors; of those at the same address, the last one counts.
    """
    labels = {seen.address: seen.label for seen in tensors}
    if device.type != "cuda":
        return {
            seen.address: Held(size_bytes=seen.size_bytes, label=labels[seen.address])
            for seen in tensors
        }
    held = {}
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                address = block["address"]
                label = labels.get(address, Label(kind=ContentKind.OTHER))
                held[address] = Held(size_bytes=block["size"], label=label)
    return held


def _refused_bytes_on_cpu(error: BaseException) -> int | None:
    """Return the size of an allocation that the allocator of CPUs refused."""
    match = _REFUSED_ON_CPU.search(str(error))
    return None if match is None else int(match[1])


def _read_history(
    entries: Sequence[Mapping[str, Any]],
) -> tuple[list[HistoryEntry], int | None]:
    """Return the history of CUDA's allocator, and the size of the last refusal.

    The history is empty if it has lost its first entries: only the profile remains.
    """
    history = [
        HistoryEntry(
            address=entry["addr"],
            size_bytes=entry["size"],
            is_release=entry["action"] == "free_requested",
        )
        for entry in entries
        if entry["action"] in ("alloc", "free_requested")
    ]
    refused = [entry["size"] for entry in entries if entry["action"] == "oom"]
    is_complete = len(entries) < _MAX_ENTRIES
    return history if is_complete else [], refused[-1] if refused else None
