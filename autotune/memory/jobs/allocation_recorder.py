"""Recorder of a computation on the meta device.

It records every new storage with its owner and its release, and the kernels. Nothing is
computed. Allocations inside of operators are invisible on this device; ``kernels`` has
a device's rules for them.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from autotune.memory.values import Allocation, Term, Trace, activations_of
from autotune.speed.jobs.count_kernels import KernelCounter
from autotune.speed.values import StepWork


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block that a kernel allocates and releases."""

    size_bytes: int
    """0 if the kernel needs no such block at this size."""


OUTPUTS = Block(0)
Requests = tuple[Block, ...]
"""Requests of a kernel to the allocator, in order: a block's first occurrence allocates
it, its second releases it, and ``OUTPUTS`` marks the allocation of the kernel's
results. The order is the same at any size."""
RequestRule = Callable[..., Requests]
"""Function from the arguments of a call to the kernel's requests."""

aten = torch.ops.aten
_IN_PLACE_IN_BACKWARD = frozenset(
    {aten.index_add.default, aten.index_put.default, aten.scatter_add.default}
)
"""Operators by which autograd adds into zeros that it has just made; under a dispatch
mode it does so in a copy."""
_LAST_RESULT_FIRST = frozenset({aten.native_dropout.default})
"""Operators whose results CUDA allocates in reverse order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveBlock:
    """An allocation whose storage exists."""

    storage: weakref.ref[Any]
    """Its callback records the release."""
    number: int
    """Number of the allocation, in the order in which they were recorded."""


class AllocationRecorder(TorchDispatchMode):
    """Recorder of all allocations and kernels in its ``with`` block.

    Args:
        request_rules: Rule of each operator that allocates more than its results.
        document_tokens: Length of the document that a token is in, on average over
            tokens. The FLOPs of varlen attention depend on it.
    """

    def __init__(
        self, request_rules: Mapping[Any, RequestRule], document_tokens: float = 0.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = KernelCounter(document_tokens)
        self.owner: str = Term.PARAMETERS
        """Term of the memory breakdown for the next allocations."""
        self.stream = 0
        """CUDA stream that uses the next allocations."""
        self._request_rules = request_rules
        self._sizes_bytes: list[int] = []
        """Size of each allocation; ``_streams`` and ``_owners`` have the rest."""
        self._streams: list[int] = []
        self._owners: list[str] = []
        self._events: list[int] = []
        """Allocations and releases, as in ``Trace.events``."""
        self._live: dict[int, _LiveBlock] = {}
        """Allocations that are not released, by the address of their storage."""
        self._repeats_from = 0
        self._paused = False
        self._forward_from = 0
        """Number of the first allocation of this forward."""
        self._allocates_nothing: dict[Any, bool] = {}
        """By operator: True for views and operators in place."""
        self._shapes: dict[Any, list[Any]] = {}
        """Shapes of results, by operator and arguments."""
        self._single: set[Any] = set()
        """Operators that return a tensor, not several."""
        # Fills the cache: references must be counted before any mode is on.
        _references_of_gradient()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        result = self._run_recorded(func, args, kwargs or {})
        self.kernels.add(func, args, kwargs or {}, result)
        return result

    def _run_recorded(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, and record its results and its internal allocations."""
        if func not in self._allocates_nothing:
            self._allocates_nothing[func] = all(
                result.alias_info is not None for result in func._schema.returns
            )
        requested: AbstractContextManager[None] = nullcontext()
        if func in self._request_rules:
            requested = self.requested(func, args, kwargs)
        with requested:
            # These are views, operators in place, and operators that return nothing.
            if self._allocates_nothing[func]:
                return func(*args, **kwargs)
            is_backward = not torch.is_grad_enabled()
            if is_backward and _is_in_place_without_mode(func, args):
                return args[0]
            return self._run_for_results(func, args, kwargs)

    @contextmanager
    def requested(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Record a kernel's requests besides its results.

        The results are recorded within the block.
        """
        rule = self._request_rules.get(func)
        requests = rule(*args, **kwargs) if rule is not None else ()
        held: dict[Block, int] = {}
        for block in requests or (OUTPUTS,):
            if block is OUTPUTS:
                yield
            elif block in held:
                self._events.append(_release_of(held.pop(block)))
            else:
                held[block] = self._record(block.size_bytes, Term.TEMPORARIES)

    def transient(self, size_bytes: int) -> None:
        """Record a block that is released at once."""
        if size_bytes:
            number = self._record(size_bytes, Term.TEMPORARIES)
            self._events.append(_release_of(number))

    def _record(self, size_bytes: int, term: str) -> int:
        """Record an allocation, and return its number."""
        number = len(self._sizes_bytes)
        self._sizes_bytes.append(size_bytes)
        self._streams.append(self.stream)
        self._owners.append(term)
        self._events.append(number)
        return number

    @contextmanager
    def owned_by(self, owner: str, stream: int = 0) -> Iterator[None]:
        """Record allocations within the block as this owner's, on this stream."""
        outer_owner = self.owner
        outer_stream = self.stream
        self.owner = owner
        self.stream = stream
        try:
            yield
        finally:
            self.owner = outer_owner
            self.stream = outer_stream

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no allocations within the block, except tensors passed to ``keep``."""
        was_paused = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = was_paused

    def keep(self, results: Any) -> None:
        """Record tensors that were computed while recording was paused."""
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor):
                self._record_storage(result)

    def drop(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the release of some tensors' blocks.

        The tensors stay for computations on the meta device.
        """
        for tensor in tensors:
            live = self._live.pop(_storage_key(tensor), None)
            if live is not None:
                self._events.append(_release_of(live.number))

    def relabel(self, tensors: Sequence[torch.Tensor], term: str) -> None:
        """Set the term of the blocks of some tensors."""
        if self._paused:
            return
        for tensor in tensors:
            live = self._live.get(_storage_key(tensor))
            if live is not None:
                self._owners[live.number] = term

    def mark_repetition(self) -> None:
        """Mark the point from which the events repeat in every further step.

        Kernels are counted from here on.
        """
        self._repeats_from = len(self._events)
        self.kernels.counts.clear()

    def forward_ended(self) -> None:
        """Mark blocks that forward made and released as temporaries.

        The others are kept for backward.
        """
        alive = {live.number for live in self._live.values()}
        for number in range(self._forward_from, len(self._owners)):
            if number not in alive and self._owners[number] != Term.COPIES:
                self._owners[number] = Term.TEMPORARIES

    def forward_begins(self) -> None:
        """Mark the beginning of a micro-batch."""
        self._forward_from = len(self._owners)

    def trace(self, work: StepWork, predicted_tokens: int) -> Trace:
        """Return the recorded trace."""
        allocations = zip(self._sizes_bytes, self._owners, self._streams, strict=True)
        return Trace(
            work=work,
            predicted_tokens=predicted_tokens,
            events=tuple(self._events),
            repeats_from=self._repeats_from,
            allocations=tuple(
                Allocation(size_bytes=size_bytes, term=owner, stream=stream)
                for size_bytes, owner, stream in allocations
            ),
        )

    def _run_for_results(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return an operator's results, and record them.

        Many operators compute their shapes in Python, a hundred times slower than a
        tensor without content is made. So shapes are kept by the arguments of a call.
        """
        key = _key((func, args, kwargs))
        shapes = self._shapes.get(key)
        if shapes is not None:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=device)
                for size, stride, dtype, device in shapes
            ]
            self._record_results(func, made)
            return made[0] if func in self._single else tuple(made)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._single.add(func)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        are_new = self._record_results(func, tensors) and len(tensors) == len(results)
        if are_new and key is not None and not isinstance(result, list):
            self._shapes[key] = [
                (tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
                for tensor in tensors
            ]
        return result

    def _record_results(self, func: Any, results: Sequence[torch.Tensor]) -> bool:
        """Record results in the order of their allocation.

        Returns:
            True if each is a whole, new storage.
        """
        ordered = reversed(results) if func in _LAST_RESULT_FIRST else results
        are_new = [self._record_storage(result) for result in ordered]
        return all(are_new)

    def _record_storage(self, tensor: torch.Tensor) -> bool:
        """Record a tensor's storage.

        Returns:
            True if it is new and the tensor covers all of it.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        size_bytes = storage.nbytes()
        if key in self._live or not size_bytes:
            return False
        number = self._record(size_bytes, self.owner)

        # Bound to the lists, not to the recorder, which a storage may outlive.
        def release(
            _: object,
            live: dict[int, Any] = self._live,
            events: list[int] = self._events,
        ) -> None:
            if live.pop(key, None) is not None:
                events.append(_release_of(number))

        self._live[key] = _LiveBlock(
            storage=weakref.ref(storage, release), number=number
        )
        return size_bytes == tensor.element_size() * tensor.numel()


def _release_of(number: int) -> int:
    """Return the event of the release of an allocation."""
    return -1 - number


def _storage_key(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _is_in_place_without_mode(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether autograd runs an operator in place if no dispatch mode is on."""
    if func in _IN_PLACE_IN_BACKWARD:
        return True
    return func is aten.add.Tensor and _adds_gradients(*args)


def _adds_gradients(first: Any, second: Any) -> bool:
    """Return whether a sum in backward adds up two gradients of one tensor.

    Autograd then writes the sum over the first gradient, provided that nothing else
    refers to that gradient.
    """
    are_alike = (
        isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
    )
    return are_alike and _references(first) == _references_of_gradient()


def _references(tensor: Any) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage.

    Autograd decides by these counts, which only private functions show.
    """
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)


@functools.cache
def _references_of_gradient() -> tuple[int, int]:
    """Return the reference counts of a gradient that nothing else refers to.

    They are counted in a real backward, as autograd and the dispatch mode also hold
    references.
    """
    counts = []

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                counts.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        value = torch.ones(2, requires_grad=True)
        total = torch.cat([value * 2, value * 3]).sum()
    with Observer():  # type: ignore[no-untyped-call]
        total.backward()
    return counts[0]


def _key(value: Any) -> Any:
    """Return the key of arguments on which shapes depend.

    Returns:
        None if one of them cannot be compared.
    """
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype, value.device.type)
    if isinstance(value, tuple | list):
        keys = tuple(_key(item) for item in value)
        for key, item in zip(keys, value, strict=True):
            if key is None and item is not None:
                return None
        return keys
    if isinstance(value, dict):
        return _key(tuple(value.items()))
    if value is None or not value.__hash__:
        return None
    # 1 and 1.0 are equal, and give results of different types.
    return (type(value), value)


def own_by_module(
    recorder: AllocationRecorder,
    module: nn.Module,
    head: Sequence[nn.Module],
    hooks: ExitStack,
) -> None:
    """Let the innermost module that is being called own all allocations.

    Allocations that the whole model makes outside of its parts are inputs before its
    encoder, and the loss after it.

    Args:
        recorder: Recorder of the allocations.
        module: The whole model.
        head: Parts of the model's head, which own their allocations as the head.
        hooks: Stack that removes the hooks.
    """
    owners: WeakIdKeyDictionary = WeakIdKeyDictionary(
        {part: activations_of(part) for part in module.modules()}
    )
    for part in head:
        owners.update(dict.fromkeys(part.modules(), Term.HEAD))
    owners[module] = Term.INPUTS
    callers: list[str] = []

    def enter(part: nn.Module, _: object) -> None:
        callers.append(recorder.owner)
        recorder.owner = owners.get(part, recorder.owner)
        if part is module:
            recorder.forward_begins()

    def leave(part: nn.Module, _: object, __: object) -> None:
        recorder.owner = callers.pop()
        if part is module:
            recorder.forward_ended()
            recorder.owner = Term.TEMPORARIES  # backward
        elif recorder.owner == Term.INPUTS:
            # The model's own operations after a call of one of its parts.
            recorder.owner = Term.HEAD

    for part in module.modules():
        hooks.enter_context(part.register_forward_pre_hook(enter))
        hooks.enter_context(part.register_forward_hook(leave))
