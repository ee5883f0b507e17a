"""Memory of any micro-batch size, from traces of a few: its peak, the terms of the peak, and the largest that fits.

Traces of different sizes have the same allocations in the same order, with other sizes
in bytes. Between two traced sizes each allocation is interpolated separately; the
sequence is then replayed through the device's allocator.

The allocator follows ``c10/cuda/CUDACachingAllocator.cpp`` under
``expandable_segments:True``. Sizes are rounded to 512 bytes. Requests of up to 1 MiB on
a stream share one segment, larger ones another. The smallest free block that is large
enough is taken; the last block of a segment counts with the size to which it could
grow. If none is large enough, the segment grows by pages of 2 or 20 MiB. Adjacent free
blocks are merged. Having to give pages back counts as not fitting.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autotune.memory.decide.batch_search import MIB, largest_within
from autotune.memory.values import MemoryBreakdown, Term, Trace

Int64 = npt.NDArray[np.int64]
ROUND_BYTES = 512
SMALL_BYTES = MIB
"""Largest request that is served from the segment for small ones."""
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 * MIB, 20 * MIB
ADDRESS_SHARE = 9 / 8
Kind = Literal["cpu", "cuda"]
GIB = 2**30

CONTEXT_BYTES = (int(0.42 * GIB), int(0.73 * GIB), int(0.92 * GIB))
"""CUDA context: least, usual and most, by the number of loaded kernels. Least and most:
public reports for GPUs from Ampere on; usual: measured on an H100 with driver 580 and
CUDA 13, with both BERT presets (``reports/gpu/``)."""
COMMUNICATION_BYTES = (int(0.5 * GIB), GIB, 2 * GIB)
"""NCCL with 2 to 8 ranks on a node: least, usual and most; public reports."""
WORKSPACE_BYTES = {True: 32 * MIB, False: 8320 * 1024}
"""cuBLAS workspace, by whether the GPU is a Hopper or later: torch's documented
defaults of CUBLAS_WORKSPACE_CONFIG."""
WORKSPACES = 2
"""Number of cuBLAS workspaces: one for the forward thread, one for the backward
thread."""
LIBRARIES_BYTES = (4 * MIB, 38 * MIB, 52 * MIB)
"""CPU overheads: least, usual, most. Measured with five models on two cores of an Intel
Xeon with AMX (33 to 52 MiB), on one (18 MiB and more), and with two models on an AMD
EPYC: 11 MiB on two cores, 6 on one."""
UNTRACED_SHARE = {"cpu": 0.005, "cuda": 0.03}
"""Kernel memory unseen by traces, as a share of the growth with the micro-batch;
measured on CPUs, assumed on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Allocations of training with a micro-batch of any size, from traces of at least two sizes.

    Shapes: R traced sizes, A allocations.
    """

    rows: Int64
    """Traced micro-batch sizes, ascending; shape (R,)."""
    traced_bytes: Int64
    """Size of each allocation in each trace; shape (R, A)."""
    term_of: Int64
    """Term of each allocation, as an index of ``terms``; shape (A,)."""
    terms: tuple[str, ...]
    streams: Int64
    """CUDA stream on which each allocation is used; shape (A,)."""
    events: Int64
    """``i``: allocation i is made; ``-1 - i``: it is released."""

    def sizes_bytes(self, rows: int) -> Int64:
        """Return the size of each allocation in bytes, shape (A,), for a micro-batch of ``rows`` sequences."""
        upper = int(np.clip(np.searchsorted(self.rows, rows), 1, len(self.rows) - 1))
        left, right = self.rows[upper - 1], self.rows[upper]
        low, high = self.traced_bytes[upper - 1], self.traced_bytes[upper]
        grown: Int64 = low + -((low - high) * (rows - left) // (right - left))
        return np.maximum(grown, 0)

    def running_bytes(self, rows: int) -> Int64:
        """Return the bytes in use after each event, before any allocator rounds them."""
        sizes = self.sizes_bytes(rows)
        made = self.events >= 0
        return np.cumsum(np.where(made, sizes[self.events], -sizes[-1 - self.events]))

    @property
    def largest_parameter_bytes(self) -> int:
        """Size of the largest single parameter, such as the embedding table."""
        number = self.terms.index(Term.PARAMETERS)
        return int(self.traced_bytes[0, self.term_of == number].max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverheads:
    """Memory that a device needs in addition to the traced allocations."""

    kind: Kind
    workspaces_bytes: tuple[int, ...] = ()
    """Blocks of PyTorch's allocator that libraries take once and keep."""
    non_pytorch_bytes: int = 0
    """Non-PyTorch memory: context, handles, communication."""
    device_bytes: float = math.inf
    """Total memory of the device; the allocator chooses other blocks when addresses are
    scarce."""


def fit_memory_model(traces: Sequence[Trace]) -> MemoryModel | None:
    """Return the memory model of traces of two or more sizes.

    None if their allocations or their order differ.
    """
    ordered = sorted(traces, key=lambda trace: trace.micro_batch_size)
    first = ordered[0]
    of_terms = [one.term for one in first.allocations]
    if any(
        one.events != first.events or [a.term for a in one.allocations] != of_terms
        for one in ordered
    ):
        return None
    number = {term: index for index, term in enumerate(sorted(set(of_terms)))}
    return MemoryModel(
        rows=np.array([trace.micro_batch_size for trace in ordered], dtype=np.int64),
        traced_bytes=np.array(
            [[one.size_bytes for one in trace.allocations] for trace in ordered],
            dtype=np.int64,
        ),
        term_of=np.array([number[term] for term in of_terms], dtype=np.int64),
        terms=tuple(number),
        streams=np.array([one.stream for one in first.allocations], dtype=np.int64),
        events=np.array(first.events, dtype=np.int64),
    )


def peak_bytes(fit: MemoryModel, rows: int, overheads: MemoryOverheads) -> int:
    """Return the peak memory of a device that trains with ``rows`` sequences per micro-batch."""
    if overheads.kind == "cpu":
        return int(fit.running_bytes(rows).max()) + overheads.non_pytorch_bytes
    # A trial's first matmuls come before the model, so that handles and workspaces are
    # there when it is built.
    workspaces, sizes = overheads.workspaces_bytes, fit.sizes_bytes(rows).tolist()
    events = [*range(len(sizes), len(sizes) + len(workspaces)), *fit.events.tolist()]
    sizes, streams = (
        [*sizes, *workspaces],
        [*fit.streams.tolist(), *[0] * len(workspaces)],
    )
    return (
        reserve(sizes, events, streams, device_bytes=overheads.device_bytes)
        + overheads.non_pytorch_bytes
    )


def memory_breakdown(
    fit: MemoryModel, rows: int, overheads: MemoryOverheads
) -> MemoryBreakdown:
    """Return the memory breakdown at the peak."""
    peak = peak_bytes(fit, rows, overheads)
    running = fit.running_bytes(rows)
    at = int(running.argmax())
    made = fit.events[: at + 1]
    signs = np.where(made >= 0, 1, -1)
    numbers = np.where(made >= 0, made, -1 - made)
    by_term = np.zeros(len(fit.terms), dtype=np.int64)
    np.add.at(by_term, fit.term_of[numbers], signs * fit.sizes_bytes(rows)[numbers])
    terms: dict[str, int] = dict(zip(fit.terms, by_term.tolist(), strict=True))
    terms |= {
        Term.WORKSPACES: sum(overheads.workspaces_bytes),
        Term.NON_PYTORCH: overheads.non_pytorch_bytes,
    }
    terms[Term.ROUNDING] = peak - sum(terms.values())
    needed = {term: size for term, size in terms.items() if size}
    return MemoryBreakdown(micro_batch_size=rows, terms_bytes=needed, peak_bytes=peak)


def largest_micro_batch_size(
    fit: MemoryModel,
    budget_bytes: float,
    overheads: MemoryOverheads,
    *,
    max_micro_batch_size: int,
) -> int:
    """Return the largest micro-batch whose peak is within a budget.

    0 if not even one sequence fits.
    """
    return largest_within(
        lambda rows: peak_bytes(fit, rows, overheads),
        budget_bytes,
        low=0,
        top=max_micro_batch_size,
    )


class Expected(NamedTuple):
    """Assumed overheads, with their range."""

    least: MemoryOverheads
    usual: MemoryOverheads
    most: MemoryOverheads


def size_range(
    fit: MemoryModel,
    budget_bytes: float,
    expected: Expected,
    *,
    max_micro_batch_size: int,
) -> tuple[int, int]:
    """Return the largest micro-batch sizes with the assumed overheads at their highest, and at their lowest."""
    unsure_bytes = UNTRACED_SHARE[expected.usual.kind] * max(
        0, budget_bytes - peak_bytes(fit, 1, expected.usual)
    )
    ends = (
        (budget_bytes - unsure_bytes, expected.most),
        (budget_bytes + unsure_bytes, expected.least),
    )
    low, high = (
        largest_micro_batch_size(fit, *end, max_micro_batch_size=max_micro_batch_size)
        for end in ends
    )
    return low, high


def expected_on_gpu(
    compute_capability: tuple[int, int] | None,
    local_ranks: int,
    device_bytes: float = math.inf,
) -> Expected:
    """Return a GPU's overheads, with NCCL's if a node has several ranks.

    Without a capability those of a Hopper.
    """
    hopper = compute_capability is None or compute_capability >= (9, 0)
    workspaces = (WORKSPACE_BYTES[hopper],) * WORKSPACES
    usual = MemoryOverheads(
        kind="cuda", workspaces_bytes=workspaces, device_bytes=device_bytes
    )
    among = COMMUNICATION_BYTES if local_ranks > 1 else (0, 0, 0)
    return Expected(
        *(
            replace(usual, non_pytorch_bytes=sum(one))
            for one in zip(CONTEXT_BYTES, among, strict=True)
        )
    )


def expected_on_cpu() -> Expected:
    """Return the memory that libraries and threads of a process take on a CPU."""
    return Expected(
        *(
            MemoryOverheads(kind="cpu", non_pytorch_bytes=size)
            for size in LIBRARIES_BYTES
        )
    )


class Segment:
    """An expandable segment: blocks by address, from 0 to ``reserved_bytes``.

    It grows by whole pages.
    """

    def __init__(self, page_bytes: int, address_bytes: float = math.inf) -> None:
        self.reserved_bytes = 0
        self._page_bytes, self._address_bytes = page_bytes, address_bytes
        self._free: list[tuple[int, int]] = []
        """Size and address of each free block, ascending."""
        self._size_at: dict[int, int] = {}
        """Sizes of the free blocks by address; ``_size_before`` has them by end
        address."""
        self._size_before: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new block."""
        index = bisect.bisect_left(self._free, (size_bytes, 0))
        if index < len(self._free) - 1:
            (size, address), (other, _) = self._free[index : index + 2]
            is_last = address + size == self.reserved_bytes
            index += is_last and other < self._address_bytes - address
        if index < len(self._free):
            found, address = self._free[index]
            self._remove(found, address)
        else:  # the last free block grows
            last = self._size_before.get(self.reserved_bytes, 0)
            address = self.reserved_bytes - last
            if last:
                self._remove(last, address)
            self.reserved_bytes = (
                -(-(address + size_bytes) // self._page_bytes) * self._page_bytes
            )
            found = self.reserved_bytes - address
        if found > size_bytes:
            self._add(found - size_bytes, address + size_bytes)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """Free a block, and merge it with free neighbours."""
        if before := self._size_before.get(address):
            self._remove(before, address - before)
            address, size_bytes = address - before, size_bytes + before
        if after := self._size_at.get(address + size_bytes):
            self._remove(after, address + size_bytes)
            size_bytes += after
        self._add(size_bytes, address)

    def _add(self, size_bytes: int, address: int) -> None:
        bisect.insort(self._free, (size_bytes, address))
        self._size_at[address] = self._size_before[address + size_bytes] = size_bytes

    def _remove(self, size_bytes: int, address: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size_bytes, address))]
        del self._size_at[address], self._size_before[address + size_bytes]


def rounded_bytes(requested_bytes: int) -> int:
    """Return the size of the block that serves a request; 0 for an empty request."""
    return -(-requested_bytes // ROUND_BYTES) * ROUND_BYTES


def reserve(
    sizes_bytes: Sequence[int],
    events: Sequence[int],
    streams: Sequence[int] | None = None,
    *,
    device_bytes: float = math.inf,
) -> int:
    """Replay a sequence of allocations.

    Return the bytes reserved at its end, which is also its peak.

    Event ``i`` makes allocation i, and ``-1 - i`` releases it. Each segment may grow to
    9/8 of the device's memory.
    """
    segments: dict[tuple[int, int], Segment] = {}
    blocks: dict[int, tuple[Segment, int, int]] = {}
    for event in events:
        if event >= 0 and (size := rounded_bytes(sizes_bytes[event])):
            page_bytes = SMALL_PAGE_BYTES if size <= SMALL_BYTES else LARGE_PAGE_BYTES
            key = page_bytes, streams[event] if streams else 0
            if key not in segments:
                segments[key] = Segment(page_bytes, device_bytes * ADDRESS_SHARE)
            blocks[event] = segments[key], segments[key].allocate(size), size
        elif -1 - event in blocks:
            segment, address, size = blocks.pop(-1 - event)
            segment.release(address, size)
    return sum(segment.reserved_bytes for segment in segments.values())
