"""Recorder of a computation on the meta device: every new storage, its owner and its release; and kernels.

Nothing is computed. Allocations inside of operators are invisible here; a device's
rules list its kernels' requests.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from autotune.memory.values import Allocation, Term, Trace, activations_of
from autotune.speed.jobs.count_kernels import KernelCounter
from autotune.speed.values import StepWork


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block that a kernel allocates and releases.

    0 bytes if it needs none at this size.
    """

    size_bytes: int


OUTPUTS = Block(0)
Requests = tuple[Block, ...]
"""Requests of a kernel to the allocator, in order: a block's first occurrence allocates
it, its second releases it, and ``OUTPUTS`` marks the allocation of the kernel's
results. The order is the same at any size."""
Within = Callable[..., Requests]
"""Function from the arguments of a call to the kernel's requests."""

aten = torch.ops.aten
_IN_PLACE_IN_BACKWARD = frozenset(
    {aten.index_add.default, aten.index_put.default, aten.scatter_add.default}
)
"""Operators by which autograd adds into zeros that it has just made; under a dispatch
mode it does so in a copy."""
_LAST_FIRST = frozenset({aten.native_dropout.default})
"""Operators whose results CUDA allocates in reverse order."""


class AllocationRecorder(TorchDispatchMode):
    """Recorder of all allocations and kernels in its ``with`` block.

    ``within`` maps operators to what they allocate internally; ``document_tokens`` is
    the mean length of a document.
    """

    def __init__(
        self, within: Mapping[Any, Within], document_tokens: float = 0.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = KernelCounter(document_tokens)
        self.owner: str = Term.PARAMETERS
        """Term of the memory breakdown for the next allocations; ``stream`` is the CUDA
        stream that uses them."""
        self.stream = 0
        self._within = within
        # Of each allocation, in bytes, and its stream.
        self._sizes: list[tuple[int, int]] = []
        self._owners: list[str] = []
        self._events: list[int] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._repeats_from = 0
        self._paused = False
        self._forward_from = 0
        self._passes: dict[Any, bool] = {}
        self._shapes: dict[Any, list[Any]] = {}
        self._single: set[Any] = set()
        _references_of_gradient()  # counted before any mode is on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        result = self._recorded(func, args, kwargs or {})
        self.kernels.add(func, args, kwargs or {}, result)
        return result

    def _recorded(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        passes = self._passes.get(func)
        if passes is None:
            passes = self._passes[func] = all(
                one.alias_info is not None for one in func._schema.returns
            )
        with (
            self.requested(func, args, kwargs)
            if func in self._within
            else nullcontext()
        ):
            if passes:  # views and operators in place; and those that return nothing
                return func(*args, **kwargs)
            backward = not torch.is_grad_enabled()
            if backward and (
                func in _IN_PLACE_IN_BACKWARD
                or (func is aten.add.Tensor and _adds_into(*args))
            ):
                return args[0]
            return self._result(func, args, kwargs)

    @contextmanager
    def requested(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Record a kernel's requests besides its results, which are recorded within the block."""
        rule = self._within.get(func)
        requests = rule(*args, **kwargs) if rule is not None else ()
        held: dict[Block, int] = {}
        for block in requests or (OUTPUTS,):
            if block is OUTPUTS:
                yield
            elif block in held:
                self._events.append(-1 - held.pop(block))
            else:
                held[block] = self._taken(block.size_bytes, Term.TEMPORARIES)

    def transient(self, size_bytes: int) -> None:
        """Record a block that is released at once."""
        if size_bytes:
            self._events.append(-1 - self._taken(size_bytes, Term.TEMPORARIES))

    def _taken(self, size_bytes: int, term: str) -> int:
        number = len(self._sizes)
        self._sizes.append((size_bytes, self.stream))
        self._owners.append(term)
        self._events.append(number)
        return number

    def owned_by(self, owner: str, stream: int = 0) -> AbstractContextManager[object]:
        """Record allocations within the block as this owner's, on this stream."""
        return mock.patch.multiple(self, owner=owner, stream=stream)

    def paused(self) -> AbstractContextManager[object]:
        """Record no allocations within the block, except tensors passed to ``keep``."""
        return mock.patch.object(self, "_paused", new=True)

    def keep(self, results: Any) -> None:
        """Record tensors that were computed while recording was paused."""
        for one in results if isinstance(results, tuple | list) else (results,):
            if isinstance(one, torch.Tensor):
                self._made(one)

    def drop(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the release of some tensors' blocks, although the tensors stay for computations on the meta device."""
        for tensor in tensors:
            if (
                found := self._live.pop(tensor.untyped_storage()._cdata, None)
            ) is not None:
                self._events.append(-1 - found[1])

    def relabel(self, tensors: Sequence[torch.Tensor], term: str) -> None:
        """Set the term of the blocks of some tensors."""
        if self._paused:
            return
        for tensor in tensors:
            if (found := self._live.get(tensor.untyped_storage()._cdata)) is not None:
                self._owners[found[1]] = term

    def marks_repetition(self) -> None:
        """Mark the point from which the events repeat in every further step, and count kernels from here on."""
        self._repeats_from = len(self._events)
        self.kernels.counts.clear()

    def forward_ended(self) -> None:
        """Mark blocks that forward made and released as temporaries.

        The others are kept for backward.
        """
        alive = {number for _, number in self._live.values()}
        for number in range(self._forward_from, len(self._owners)):
            if number not in alive and self._owners[number] != Term.COPIES:
                self._owners[number] = Term.TEMPORARIES

    def forward_begins(self) -> None:
        """Mark the beginning of a micro-batch."""
        self._forward_from = len(self._owners)

    def trace(self, work: StepWork, predicted_tokens: int) -> Trace:
        """Return the recorded trace."""
        made = zip(self._sizes, self._owners, strict=True)
        return Trace(
            work=work,
            predicted_tokens=predicted_tokens,
            events=tuple(self._events),
            repeats_from=self._repeats_from,
            allocations=tuple(
                Allocation(size_bytes=size, term=owner, stream=on)
                for (size, on), owner in made
            ),
        )

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's results, of the known shapes if it has been called with equal arguments before.

        Many operators compute their shapes in Python, a hundred times slower than a
        tensor without content is made.
        """
        key = _key((func, args, kwargs))
        if (shapes := self._shapes.get(key)) is not None:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=on)
                for size, stride, dtype, on in shapes
            ]
            self._all_made(func, made)
            return made[0] if func in self._single else tuple(made)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._single.add(func)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [one for one in results if isinstance(one, torch.Tensor)]
        fresh = self._all_made(func, tensors) and len(tensors) == len(results)
        if fresh and key is not None and not isinstance(result, list):
            self._shapes[key] = [
                (one.size(), one.stride(), one.dtype, one.device) for one in tensors
            ]
        return result

    def _all_made(self, func: Any, results: Sequence[torch.Tensor]) -> bool:
        """Record results in the order of their allocation.

        Return True if each is a whole, new storage.
        """
        recorded = [
            self._made(one)
            for one in (reversed(results) if func in _LAST_FIRST else results)
        ]
        return all(recorded)

    def _made(self, tensor: torch.Tensor) -> bool:
        """Record a tensor's storage.

        Return True if it is new and the tensor covers all of it.
        """
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._live or not size_bytes:
            return False
        number = self._taken(size_bytes, self.owner)

        def released(
            _: object,
            live: dict[int, Any] = self._live,
            events: list[int] = self._events,
        ) -> None:
            if live.pop(key, None) is not None:
                events.append(-1 - number)

        self._live[key] = (weakref.ref(storage, released), number)
        return size_bytes == tensor.element_size() * tensor.numel()


def _adds_into(one: Any, other: Any) -> bool:
    """Return whether a sum in backward adds up gradients of one tensor, which is in place without a dispatch mode.

    It adds to the first gradient if nothing else refers to that.
    """
    alike = (
        isinstance(other, torch.Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
    )
    return alike and _references(one) == _references_of_gradient()


def _references(
    tensor: Any,
) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(
        tensor.untyped_storage()._cdata
    )


@functools.cache
def _references_of_gradient() -> tuple[int, int]:
    """Return the reference counts of a gradient and its storage if only autograd and a dispatch mode hold them."""
    found = []

    class Watchdog(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                found.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        value = torch.ones(2, requires_grad=True)
        total = torch.cat([value * 2, value * 3]).sum()
    with Watchdog():  # type: ignore[no-untyped-call]
        total.backward()
    return found[0]


def _key(value: Any) -> Any:
    """Return the key of arguments on which shapes depend.

    None if one of them cannot be compared.
    """
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype, value.device.type)
    if isinstance(value, tuple | list):
        keys = tuple(_key(one) for one in value)
        return (
            None
            if any(
                key is None
                for key, one in zip(keys, value, strict=True)
                if one is not None
            )
            else keys
        )
    if isinstance(value, dict):
        return _key(tuple(value.items()))
    # 1 and 1.0 are equal, and give results of different types.
    return None if value is None else (type(value), value) if value.__hash__ else None


def own_by_module(
    tape: AllocationRecorder,
    module: nn.Module,
    head: Sequence[nn.Module],
    hooks: ExitStack,
) -> None:
    """Let the innermost module that is being called own all allocations, until the hooks are removed.

    Allocations by ``module``, the whole model, itself are inputs before its encoder and
    the loss after it; allocations by parts of ``head`` are the head's.
    """
    names: WeakIdKeyDictionary = WeakIdKeyDictionary(
        {part: activations_of(part) for part in module.modules()}
    )
    for part in head:
        names.update(dict.fromkeys(part.modules(), Term.HEAD))
    names[module] = Term.INPUTS
    stack: list[str] = []

    def enter(part: nn.Module, _: object) -> None:
        stack.append(tape.owner)
        tape.owner = names.get(part, tape.owner)
        if part is module:
            tape.forward_begins()

    def leave(part: nn.Module, _: object, __: object) -> None:
        tape.owner = stack.pop()
        if part is module:
            tape.forward_ended()
            tape.owner = Term.TEMPORARIES  # backward
        elif tape.owner == Term.INPUTS:
            # The model's own operations after a call of one of its parts.
            tape.owner = Term.HEAD

    for part in module.modules():
        hooks.enter_context(part.register_forward_pre_hook(enter))
        hooks.enter_context(part.register_forward_hook(leave))
