"""Memory of any micro-batch size, from traces of a few sizes.

It gives the peak, the terms of the peak, and the largest micro-batch that fits.

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
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autotune.memory.decide.batch_search import MIB, largest_within
from autotune.memory.values import MemoryBreakdown, Term, Trace

Int64 = npt.NDArray[np.int64]
DeviceKind = Literal["cpu", "cuda"]
GIB = 2**30

ROUND_BYTES = 512
SMALL_BYTES = MIB
"""Largest request that is served from the segment for small ones."""
SMALL_PAGE_BYTES = 2 * MIB
LARGE_PAGE_BYTES = 20 * MIB
ADDRESS_SHARE = 9 / 8
"""Addresses that a segment reserves, as a share of the device's memory."""


class BytesRange(NamedTuple):
    """An assumed amount of memory, with its range."""

    least: int
    usual: int
    most: int


CONTEXT_BYTES = BytesRange(
    least=int(0.42 * GIB), usual=int(0.73 * GIB), most=int(0.92 * GIB)
)
"""CUDA context: least, usual and most, by the number of loaded kernels. Least and most:
public reports for GPUs from Ampere on; usual: measured on an H100 with driver 580 and
CUDA 13, with both BERT presets (``reports/gpu/``)."""
COMMUNICATION_BYTES = BytesRange(least=int(0.5 * GIB), usual=GIB, most=2 * GIB)
"""NCCL with 2 to 8 ranks on a node: least, usual and most; public reports."""
NO_COMMUNICATION_BYTES = BytesRange(least=0, usual=0, most=0)
HOPPER_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS workspace of a Hopper or later: torch's documented default of
CUBLAS_WORKSPACE_CONFIG."""
OLDER_WORKSPACE_BYTES = 8320 * 1024
"""cuBLAS workspace of a GPU before Hopper: torch's documented default."""
WORKSPACES = 2
"""Number of cuBLAS workspaces: one for the forward thread, one for the backward
thread."""
LIBRARIES_BYTES = BytesRange(least=4 * MIB, usual=38 * MIB, most=52 * MIB)
"""CPU overheads: least, usual, most. Measured with five models on two cores of an Intel
Xeon with AMX (33 to 52 MiB), on one (18 MiB and more), and with two models on an AMD
EPYC: 11 MiB on two cores, 6 on one."""
UNTRACED_SHARE = {"cpu": 0.005, "cuda": 0.03}
"""Kernel memory unseen by traces, as a share of the growth with the micro-batch;
measured on CPUs, assumed on GPUs."""
MEASURED_TORCH = "2.11"
"""Version of torch whose compiled steps were measured on a GPU (docs/benchmarks.md)."""
NEWER_TORCH_SHARE = 0.13
"""Share by which a compiled step of newer torch is traced to need less per sequence.

bert-120m took 177 MB on an H100 with torch 2.11; traced with 2.13 it takes 154 MB, as
that keeps less for backward. No GPU has confirmed the difference, so it may be smaller.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Allocations of training with a micro-batch of any size, from two traces or more.

    Shapes: R traced sizes, A allocations.
    """

    micro_batch_sizes: Int64
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

    def sizes_bytes(self, micro_batch_size: int) -> Int64:
        """Return the size of each allocation for a micro-batch, shape (A,).

        Sizes are interpolated between two traces, and extrapolated outside of them.
        """
        sizes = self.micro_batch_sizes
        position = np.searchsorted(sizes, micro_batch_size)
        upper = int(np.clip(position, 1, len(sizes) - 1))
        lower_size, upper_size = sizes[upper - 1], sizes[upper]
        low, high = self.traced_bytes[upper - 1], self.traced_bytes[upper]
        distance = micro_batch_size - lower_size
        # Two negations round the division up instead of down.
        interpolated: Int64 = low + -(
            (low - high) * distance // (upper_size - lower_size)
        )
        return np.maximum(interpolated, 0)

    def running_bytes(self, micro_batch_size: int) -> Int64:
        """Return the bytes in use after each event, before an allocator rounds them."""
        sizes = self.sizes_bytes(micro_batch_size)
        is_made = self.events >= 0
        changes = np.where(is_made, sizes[self.events], -sizes[-1 - self.events])
        return np.cumsum(changes)

    @property
    def largest_parameter_bytes(self) -> int:
        """Size of the largest single parameter, such as the embedding table."""
        number = self.terms.index(Term.PARAMETERS)
        return int(self.traced_bytes[0, self.term_of == number].max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverheads:
    """Memory that a device needs in addition to the traced allocations."""

    kind: DeviceKind
    workspaces_bytes: tuple[int, ...] = ()
    """Blocks of PyTorch's allocator that libraries take once and keep."""
    non_pytorch_bytes: int = 0
    """Non-PyTorch memory: context, handles, communication."""
    device_bytes: float = math.inf
    """Total memory of the device; the allocator chooses other blocks when addresses are
    scarce."""


class OverheadsRange(NamedTuple):
    """Assumed overheads, with their range."""

    least: MemoryOverheads
    usual: MemoryOverheads
    most: MemoryOverheads


def fit_memory_model(traces: Sequence[Trace]) -> MemoryModel | None:
    """Return the memory model of traces of two or more sizes.

    Returns:
        None if their allocations or their order differ.
    """
    ordered = sorted(traces, key=lambda trace: trace.micro_batch_size)
    first = ordered[0]
    terms = _terms_of(first)
    for trace in ordered:
        if trace.events != first.events or _terms_of(trace) != terms:
            return None
    number = {term: index for index, term in enumerate(sorted(set(terms)))}
    traced_bytes = [
        [allocation.size_bytes for allocation in trace.allocations] for trace in ordered
    ]
    streams = [allocation.stream for allocation in first.allocations]
    return MemoryModel(
        micro_batch_sizes=np.array(
            [trace.micro_batch_size for trace in ordered], dtype=np.int64
        ),
        traced_bytes=np.array(traced_bytes, dtype=np.int64),
        term_of=np.array([number[term] for term in terms], dtype=np.int64),
        terms=tuple(number),
        streams=np.array(streams, dtype=np.int64),
        events=np.array(first.events, dtype=np.int64),
    )


def _terms_of(trace: Trace) -> list[str]:
    return [allocation.term for allocation in trace.allocations]


def peak_bytes(
    model: MemoryModel, micro_batch_size: int, overheads: MemoryOverheads
) -> int:
    """Return the peak memory of a device that trains with this micro-batch size."""
    if overheads.kind == "cpu":
        running = model.running_bytes(micro_batch_size)
        return int(running.max()) + overheads.non_pytorch_bytes
    traced_bytes = model.sizes_bytes(micro_batch_size).tolist()
    # The first matmuls come before the model, so that handles and workspaces are there
    # when it is built: workspaces are allocated first, numbered after the traced ones.
    workspaces_bytes = overheads.workspaces_bytes
    workspace_numbers = range(
        len(traced_bytes), len(traced_bytes) + len(workspaces_bytes)
    )
    reserved_bytes = reserve(
        [*traced_bytes, *workspaces_bytes],
        [*workspace_numbers, *model.events.tolist()],
        [*model.streams.tolist(), *[0] * len(workspaces_bytes)],
        device_bytes=overheads.device_bytes,
    )
    return reserved_bytes + overheads.non_pytorch_bytes


def memory_breakdown(
    model: MemoryModel, micro_batch_size: int, overheads: MemoryOverheads
) -> MemoryBreakdown:
    """Return the memory breakdown at the peak."""
    peak = peak_bytes(model, micro_batch_size, overheads)
    peak_event = int(model.running_bytes(micro_batch_size).argmax())
    events = model.events[: peak_event + 1]
    is_made = events >= 0
    signs = np.where(is_made, 1, -1)
    numbers = np.where(is_made, events, -1 - events)
    sizes = model.sizes_bytes(micro_batch_size)
    by_term = np.zeros(len(model.terms), dtype=np.int64)
    np.add.at(by_term, model.term_of[numbers], signs * sizes[numbers])
    terms: dict[str, int] = dict(zip(model.terms, by_term.tolist(), strict=True))
    terms[Term.WORKSPACES] = sum(overheads.workspaces_bytes)
    terms[Term.NON_PYTORCH] = overheads.non_pytorch_bytes
    terms[Term.ROUNDING] = peak - sum(terms.values())
    return MemoryBreakdown(
        micro_batch_size=micro_batch_size,
        terms_bytes={term: size for term, size in terms.items() if size},
        peak_bytes=peak,
    )


def largest_micro_batch_size(
    model: MemoryModel,
    budget_bytes: float,
    overheads: MemoryOverheads,
    *,
    max_micro_batch_size: int,
) -> int:
    """Return the largest micro-batch whose peak is within a budget.

    Returns:
        0 if not even one sequence fits.
    """
    return largest_within(
        lambda micro_batch_size: peak_bytes(model, micro_batch_size, overheads),
        budget_bytes,
        low=0,
        top=max_micro_batch_size,
    )


def size_range(
    model: MemoryModel,
    budget_bytes: float,
    overheads: OverheadsRange,
    *,
    max_micro_batch_size: int,
    unconfirmed_share: float = 0.0,
) -> tuple[int, int]:
    """Return the largest micro-batch size with most, and with least overheads.

    A step may also need more by ``unconfirmed_share`` of its growth with the size.
    """
    growth_bytes = max(0, budget_bytes - peak_bytes(model, 1, overheads.usual))
    untraced_bytes = UNTRACED_SHARE[overheads.usual.kind] * growth_bytes
    low = largest_micro_batch_size(
        model,
        budget_bytes - untraced_bytes - unconfirmed_share * growth_bytes,
        overheads.most,
        max_micro_batch_size=max_micro_batch_size,
    )
    high = largest_micro_batch_size(
        model,
        budget_bytes + untraced_bytes,
        overheads.least,
        max_micro_batch_size=max_micro_batch_size,
    )
    return low, high


def unconfirmed_share(device: str, torch_version: str, *, is_compiled: bool) -> float:
    """Return the share by which a traced step may need more than it was traced to."""
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    is_newer = numbers > [int(number) for number in MEASURED_TORCH.split(".")]
    if device == "cuda" and is_compiled and is_newer:
        return NEWER_TORCH_SHARE
    return 0.0


def overheads_on_gpu(
    compute_capability: tuple[int, int] | None,
    local_ranks: int,
    device_bytes: float = math.inf,
) -> OverheadsRange:
    """Return a GPU's overheads, with NCCL's if a node has several ranks.

    Without a capability, return those of a Hopper.
    """
    is_hopper = compute_capability is None or compute_capability >= (9, 0)
    workspace_bytes = HOPPER_WORKSPACE_BYTES if is_hopper else OLDER_WORKSPACE_BYTES
    nccl = COMMUNICATION_BYTES if local_ranks > 1 else NO_COMMUNICATION_BYTES

    def overheads(non_pytorch_bytes: int) -> MemoryOverheads:
        return MemoryOverheads(
            kind="cuda",
            workspaces_bytes=(workspace_bytes,) * WORKSPACES,
            non_pytorch_bytes=non_pytorch_bytes,
            device_bytes=device_bytes,
        )

    return OverheadsRange(
        least=overheads(CONTEXT_BYTES.least + nccl.least),
        usual=overheads(CONTEXT_BYTES.usual + nccl.usual),
        most=overheads(CONTEXT_BYTES.most + nccl.most),
    )


def overheads_on_cpu() -> OverheadsRange:
    """Return the memory that libraries and threads of a process take on a CPU."""
    return OverheadsRange(
        *(
            MemoryOverheads(kind="cpu", non_pytorch_bytes=size_bytes)
            for size_bytes in LIBRARIES_BYTES
        )
    )


class Segment:
    """An expandable segment: blocks by address, from 0 to ``reserved_bytes``.

    It grows by whole pages.
    """

    def __init__(self, page_bytes: int, address_bytes: float = math.inf) -> None:
        self.reserved_bytes = 0
        self._page_bytes = page_bytes
        self._address_bytes = address_bytes
        self._free: list[tuple[int, int]] = []
        """Size and address of each free block, ascending."""
        self._size_at: dict[int, int] = {}
        """Sizes of the free blocks by address."""
        self._size_before: dict[int, int] = {}
        """Sizes of the free blocks by end address."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new block."""
        index = bisect.bisect_left(self._free, (size_bytes, 0))
        if index + 1 < len(self._free):
            block_bytes, address = self._free[index]
            next_bytes, _ = self._free[index + 1]
            # The last block counts with the size to which it could grow, so that the
            # next larger one may be the smaller of the two.
            is_last = address + block_bytes == self.reserved_bytes
            if is_last and next_bytes < self._address_bytes - address:
                index += 1
        if index < len(self._free):
            block_bytes, address = self._free[index]
            self._remove(block_bytes, address)
        else:
            address = self._grow(size_bytes)
            block_bytes = self.reserved_bytes - address
        if block_bytes > size_bytes:
            self._add(block_bytes - size_bytes, address + size_bytes)
        return address

    def _grow(self, size_bytes: int) -> int:
        """Grow by whole pages until a block fits at the end; return its address.

        A free block at the end becomes a part of it.
        """
        last_bytes = self._size_before.get(self.reserved_bytes, 0)
        address = self.reserved_bytes - last_bytes
        if last_bytes:
            self._remove(last_bytes, address)
        pages = -(-(address + size_bytes) // self._page_bytes)
        self.reserved_bytes = pages * self._page_bytes
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """Free a block, and merge it with free neighbours."""
        before_bytes = self._size_before.get(address)
        if before_bytes:
            self._remove(before_bytes, address - before_bytes)
            address -= before_bytes
            size_bytes += before_bytes
        after_bytes = self._size_at.get(address + size_bytes)
        if after_bytes:
            self._remove(after_bytes, address + size_bytes)
            size_bytes += after_bytes
        self._add(size_bytes, address)

    def _add(self, size_bytes: int, address: int) -> None:
        bisect.insort(self._free, (size_bytes, address))
        self._size_at[address] = size_bytes
        self._size_before[address + size_bytes] = size_bytes

    def _remove(self, size_bytes: int, address: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size_bytes, address))]
        del self._size_at[address]
        del self._size_before[address + size_bytes]


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
    """Replay a sequence of allocations through the caching allocator.

    Each segment may grow to 9/8 of the device's memory.

    Args:
        sizes_bytes: Requested size of each allocation.
        events: ``i`` makes allocation i, and ``-1 - i`` releases it.
        streams: CUDA stream of each allocation; None if all are on one.
        device_bytes: Memory of the device.

    Returns:
        The bytes that are reserved at the end. Segments never shrink, so it is the
        peak.
    """
    segments: dict[tuple[int, int], Segment] = {}
    blocks: dict[int, tuple[Segment, int, int]] = {}
    for event in events:
        if event >= 0:
            size = rounded_bytes(sizes_bytes[event])
            if not size:
                continue
            page_bytes = SMALL_PAGE_BYTES if size <= SMALL_BYTES else LARGE_PAGE_BYTES
            key = page_bytes, streams[event] if streams else 0
            if key not in segments:
                segments[key] = Segment(page_bytes, device_bytes * ADDRESS_SHARE)
            segment = segments[key]
            blocks[event] = segment, segment.allocate(size), size
        elif -1 - event in blocks:
            segment, address, size = blocks.pop(-1 - event)
            segment.release(address, size)
    return sum(segment.reserved_bytes for segment in segments.values())
