"""Sums that autograd makes in place in backward, unless a dispatch mode is on.

A dispatch mode also refers to the tensors, so that autograd sums them into a copy.
"""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ADDS_INTO_ZEROS = frozenset(
    {aten.index_add.default, aten.index_put.default, aten.scatter_add.default}
)
"""Operators by which autograd adds into zeros that it has just made."""


def is_in_place_without_mode(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether autograd runs an operator in place if no dispatch mode is on.

    Args:
        func: An operator that a dispatch mode receives in backward.
        args: Its positional arguments, of which the first one would be written over.
    """
    if func in _ADDS_INTO_ZEROS:
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
    return are_alike and _references(first) == references_of_gradient()


def _references(tensor: Any) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage.

    Autograd decides by these counts, which only private functions show.
    """
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)


@functools.cache
def references_of_gradient() -> tuple[int, int]:
    """Return the reference counts of a gradient that nothing else refers to.

    They are counted in a real backward, as autograd and the dispatch mode also hold
    references. The first call must be made before any dispatch mode is on.
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
