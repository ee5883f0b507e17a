"""Requests of a kernel to the memory allocator, besides its results."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of memory that a kernel allocates and releases.

    Blocks are compared by identity, as a kernel may use two of the same size.
    """

    size_bytes: int
    """0 if the kernel needs no such block at this size."""


OUTPUTS = Block(0)
"""Stands for the allocation of a kernel's results among its requests."""
Requests = tuple[Block, ...]
"""Requests of a kernel, in order: the first occurrence of a block allocates it, the
second one releases it. The order is the same at any size."""
RequestRule = Callable[..., Requests]
"""Function that takes the arguments of a call, and returns the kernel's requests."""
