"""Recorder of a computation on the meta device.

It records every new storage with its owner and its release, and the kernels. Nothing is
computed. Allocations inside of operators are invisible on this device; ``kernels`` has
a device's rules for them.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.memory.jobs.allocator_requests import OUTPUTS, Block, RequestRule
from autotune.memory.jobs.argument_keys import call_key
from autotune.memory.jobs.gradient_sums import (
    is_in_place_without_mode,
    references_of_gradient,
)
from autotune.memory.values import Allocation, Term, Trace
from autotune.speed.jobs.count_kernels import KernelCounter
from autotune.speed.values import StepWork

aten = torch.ops.aten
_LAST_RESULT_FIRST = frozenset({aten.native_dropout.default})
"""Operators whose results CUDA allocates in reverse order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveBlock:
    """An allocation whose storage exists."""

    storage: weakref.ref[Any]
    """Reference to the storage; its callback records the release."""
    number: int
    """Number of the allocation, in the order in which they were recorded."""


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A recorded allocation, whose owner may still change."""

    size_bytes: int
    owner: str
    """Term of the memory breakdown."""
    stream: int
    """CUDA stream that uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Everything that a new tensor without content needs."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Shape":
        return cls(
            size=tensor.size(),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )

    def make(self) -> torch.Tensor:
        return torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device=self.device
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownResults:
    """Results of a call, which further calls with such arguments have too."""

    shapes: Sequence[_Shape]
    is_tuple: bool
    """False if the operator returns its only result without a tuple."""


class AllocationRecorder(TorchDispatchMode):
    """Recorder of all allocations and kernels in its ``with`` block.

    Args:
        request_rules: Rule of each operator that allocates more than its results.
        kernels: Count of the kernels; None for one of torch's operators alone, without
            documents.
    """

    def __init__(
        self,
        request_rules: Mapping[Any, RequestRule],
        kernels: KernelCounter | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = KernelCounter(0.0) if kernels is None else kernels
        self.owner: str = Term.PARAMETERS
        """Term of the memory breakdown for the next allocations."""
        self.stream = 0
        """CUDA stream that uses the next allocations."""
        self._request_rules = request_rules
        self._allocations: list[_Recorded] = []
        self._events: list[int] = []
        """Allocations and releases, as in ``Trace.events``."""
        self._live: dict[int, _LiveBlock] = {}
        """Allocations that are not released, by the address of their storage."""
        self._repeats_from = 0
        """Number of events before ``mark_repetition``."""
        self._paused = False
        self._forward_from = 0
        """Number of the first allocation of this forward."""
        self._allocates_nothing: dict[Any, bool] = {}
        """By operator: True for views, operators in place and those without results."""
        self._known_results: dict[Any, _KnownResults] = {}
        """Results by operator and arguments, for operators that make new tensors."""
        # Fills the cache: references must be counted before any mode is on.
        references_of_gradient()

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
            if self._allocates_nothing[func]:
                return func(*args, **kwargs)
            is_backward = not torch.is_grad_enabled()
            if is_backward and is_in_place_without_mode(func, args):
                return args[0]
            return self._run_for_results(func, args, kwargs)

    @contextmanager
    def requested(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Record a kernel's requests besides its results.

        The caller records the results within the block.

        Args:
            func: Operator that calls the kernel; one without a rule requests nothing.
            args: Positional arguments of the operator.
            kwargs: Keyword arguments of the operator.
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

    def record_transient(self, size_bytes: int) -> None:
        """Record a block that is released at once."""
        if size_bytes:
            number = self._record(size_bytes, Term.TEMPORARIES)
            self._events.append(_release_of(number))

    def _record(self, size_bytes: int, term: str) -> int:
        """Record an allocation, and return its number."""
        number = len(self._allocations)
        self._allocations.append(
            _Recorded(size_bytes=size_bytes, owner=term, stream=self.stream)
        )
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
        """Record no allocations within the block, except by ``record_results``."""
        was_paused = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = was_paused

    def record_results(self, results: Any) -> None:
        """Record the results of an operator that ran while recording was paused."""
        for result in _as_sequence(results):
            if isinstance(result, torch.Tensor):
                self._record_storage(result)

    def record_release(self, tensors: Sequence[torch.Tensor]) -> None:
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
                self._allocations[live.number].owner = term

    def mark_repetition(self) -> None:
        """Mark the point from which the events repeat in every further step.

        Kernels are counted from here on.
        """
        self._repeats_from = len(self._events)
        self.kernels.counts.clear()

    def forward_begins(self) -> None:
        """Mark the beginning of a micro-batch."""
        self._forward_from = len(self._allocations)

    def forward_ended(self) -> None:
        """Mark blocks that forward made and released as temporaries.

        The others are kept for backward.
        """
        alive = {live.number for live in self._live.values()}
        for number in range(self._forward_from, len(self._allocations)):
            allocation = self._allocations[number]
            is_released = number not in alive
            if is_released and allocation.owner != Term.COPIES:
                allocation.owner = Term.TEMPORARIES

    def trace(self, work: StepWork, predicted_tokens: int) -> Trace:
        """Return the recorded trace."""
        return Trace(
            work=work,
            predicted_tokens=predicted_tokens,
            events=tuple(self._events),
            repeats_from=self._repeats_from,
            allocations=tuple(
                Allocation(
                    size_bytes=allocation.size_bytes,
                    term=allocation.owner,
                    stream=allocation.stream,
                )
                for allocation in self._allocations
            ),
        )

    def _run_for_results(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return an operator's results, and record them.

        Many operators compute their shapes in Python, a hundred times slower than a
        tensor without content is made. So shapes are kept by the arguments of a call.
        """
        key = call_key((func, args, kwargs))
        known = self._known_results.get(key)
        if known is not None:
            made = [shape.make() for shape in known.shapes]
            self._record_in_order(func, made)
            return tuple(made) if known.is_tuple else made[0]
        result = func(*args, **kwargs)
        results = _as_sequence(result)
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        are_new = self._record_in_order(func, tensors) and len(tensors) == len(results)
        if are_new and key is not None and not isinstance(result, list):
            self._known_results[key] = _KnownResults(
                shapes=[_Shape.of(tensor) for tensor in tensors],
                is_tuple=isinstance(result, tuple),
            )
        return result

    def _record_in_order(self, func: Any, results: Sequence[torch.Tensor]) -> bool:
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


def _as_sequence(results: Any) -> Sequence[Any]:
    """Return the results of an operator, which may be a single one."""
    return results if isinstance(results, tuple | list) else (results,)


def _release_of(number: int) -> int:
    """Return the event of the release of an allocation."""
    return -1 - number


def _storage_key(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
