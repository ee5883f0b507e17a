"""Memory of any micro-batch size, from traces of a few sizes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.units import MIB
from autotune.memory.decide.memory_model import (
    MemoryModel,
    fit_memory_model,
    largest_micro_batch_size,
    memory_breakdown,
    peak_bytes,
)
from autotune.memory.decide.overheads import MemoryOverheads
from autotune.memory.values import Allocation, Term, Trace
from tests.autotune.memory.simulated_traces import trace_of

MAX_MICRO_BATCH_SIZE = 96
ON_CPU = MemoryOverheads(kind="cpu")
ON_GPU = MemoryOverheads(kind="cuda")
OVERHEADS = st.sampled_from(
    [
        ON_CPU,
        replace(ON_CPU, non_pytorch_bytes=38 * MIB),
        ON_GPU,
        replace(
            ON_GPU,
            workspaces_bytes=(32 * MIB, 32 * MIB),
            non_pytorch_bytes=600 * MIB,
        ),
    ]
)


class Block(NamedTuple):
    """A block whose size grows evenly with the micro-batch size."""

    fixed_bytes: int
    bytes_per_sequence: int
    term: str

    def size_bytes(self, micro_batch_size: int) -> int:
        return self.fixed_bytes + micro_batch_size * self.bytes_per_sequence


EVEN_BLOCKS = (
    Block(fixed_bytes=100, bytes_per_sequence=0, term=Term.PARAMETERS),
    Block(fixed_bytes=0, bytes_per_sequence=4096, term="activations"),
    Block(fixed_bytes=7, bytes_per_sequence=1024, term="activations"),
)
TRACED_SIZES = (3, 11, 40)


def trace_of_blocks(size: int, blocks: Sequence[Block], events: Sequence[int]) -> Trace:
    """Return the trace of a micro-batch size that makes and releases blocks."""
    allocations = [
        Allocation(size_bytes=block.size_bytes(size), term=block.term)
        for block in blocks
    ]
    return trace_of(size, allocations, events)


def fitted_model(*blocks: Block, events: Sequence[int] | None = None) -> MemoryModel:
    """Return the model of blocks; without ``events``, they are made in turn."""
    if events is None:
        events = range(len(blocks))
    model = fit_memory_model([trace_of_blocks(size, blocks, events) for size in (8, 3)])
    assert model is not None
    return model


@st.composite
def memory_models(draw) -> MemoryModel:
    """Draw a model of parameters, then of blocks that are released in any order."""
    block_count = draw(st.integers(2, 14))
    parameter_count = draw(st.integers(1, block_count))
    # Empty, small and large requests of the allocator.
    fixed_sizes = st.sampled_from([0, 4, 512, 100_000, 3 * MIB, 30 * MIB])
    sizes_by_sequence = st.sampled_from([0, 4, 2048, 100_000, 5 * MIB])
    other_terms = ("activations", "optimizer")
    blocks = []
    events = []
    # Indices of the blocks that can be released.
    live: list[int] = []
    for index in range(block_count):
        is_parameter = index < parameter_count
        term = Term.PARAMETERS if is_parameter else other_terms[index % 2]
        blocks.append(Block(draw(fixed_sizes), draw(sizes_by_sequence), term))
        while live and draw(st.booleans()):
            released = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(-1 - released)
        events.append(index)
        # Parameters are never released.
        if not is_parameter:
            live.append(index)
    return fitted_model(*blocks, events=events)


def uneven_bytes(size: int) -> int:
    """Return the size of a block that grows by 1,000 bytes every seven sequences."""
    return 1000 * math.ceil(size / 7)


def model_of_an_uneven_block(traced_sizes: Sequence[int]) -> MemoryModel:
    """Return the model of traces of one block with ``uneven_bytes``."""
    traces = []
    for size in traced_sizes:
        block = Allocation(size_bytes=uneven_bytes(size), term=Term.PARAMETERS)
        traces.append(trace_of(size, [block], events=[0]))
    model = fit_memory_model(traces)
    assert model is not None
    return model


@given(size=st.integers(1, 20_000))
def test_evenly_growing_sizes_are_exact(size):
    sizes_bytes = fitted_model(*EVEN_BLOCKS).sizes_bytes(size).tolist()
    assert sizes_bytes == [block.size_bytes(size) for block in EVEN_BLOCKS]


def slots_of(size: int) -> int:
    """Return 10 slots for each sequence, rounded up to a multiple of 64."""
    return 64 * math.ceil(10 * size / 64)


def model_of_a_head(traced_sizes: Sequence[int], slots_of_traces=slots_of):
    """Return the model of parameters, activations and 8 bytes for each slot."""
    traces = []
    for size in traced_sizes:
        sizes_bytes = {
            Term.PARAMETERS: 5000,
            "activations": 4096 * size,
            Term.HEAD: 8 * slots_of(size),
        }
        blocks = [
            Allocation(size_bytes=size_bytes, term=term)
            for term, size_bytes in sizes_bytes.items()
        ]
        slots = slots_of_traces(size)
        traces.append(trace_of(size, blocks, [0, 1, 2], predicted_tokens=slots))
    model = fit_memory_model(traces, slots_of)
    assert model is not None
    return model


@pytest.mark.parametrize("traced_sizes", [(8, 100), (7, 40, 99)])
@given(size=st.integers(1, 1000))
def test_slots_of_the_head_are_exact(traced_sizes, size):
    sizes_bytes = model_of_a_head(traced_sizes).sizes_bytes(size).tolist()
    assert sizes_bytes == [5000, 4096 * size, 8 * slots_of(size)]


def test_other_numbers_of_slots_are_ignored():
    def other_slots_of(size: int) -> int:
        return slots_of(size) + 64

    model = model_of_a_head((8, 100), other_slots_of)
    between_bytes = model.sizes_bytes(50)[2]
    growth_bytes = 8 * (slots_of(100) - slots_of(8))
    assert between_bytes == 8 * slots_of(8) + math.ceil(growth_bytes * 42 / 92)
    assert between_bytes != 8 * slots_of(50)


def test_traces_with_equal_slots_show_no_growth():
    model = model_of_a_head((1, 6))
    assert slots_of(1) == slots_of(6)
    assert model.sizes_bytes(50).tolist() == [5000, 4096 * 50, 8 * 64]


@given(size=st.integers(TRACED_SIZES[0], TRACED_SIZES[-1]))
def test_other_sizes_lie_between_their_neighbours(size):
    (size_bytes,) = model_of_an_uneven_block(TRACED_SIZES).sizes_bytes(size)
    below = max(traced for traced in TRACED_SIZES if traced <= size)
    above = min(traced for traced in TRACED_SIZES if traced >= size)
    assert uneven_bytes(below) <= size_bytes <= uneven_bytes(above)


@given(size=st.integers(1, 100))
def test_no_block_has_a_negative_size(size):
    (size_bytes,) = model_of_an_uneven_block(TRACED_SIZES).sizes_bytes(size)
    assert size_bytes >= 0


def test_traces_may_be_in_any_order():
    shuffled = model_of_an_uneven_block((40, 3, 11))
    assert shuffled.micro_batch_sizes.tolist() == [3, 11, 40]
    assert shuffled.traced_bytes.tolist() == [[1000], [2000], [6000]]


LAST_TRACE = trace_of_blocks(24, EVEN_BLOCKS, events=[0, 1, 2])
FIRST_ALLOCATIONS = LAST_TRACE.allocations[:2]
OTHER_TERM = replace(LAST_TRACE.allocations[2], term="another")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"events": (0, 2, 1)}, id="another order"),
        pytest.param({"events": (0, 1, 2, -3)}, id="a release more"),
        pytest.param(
            {"allocations": FIRST_ALLOCATIONS, "events": (0, 1)}, id="a block less"
        ),
        pytest.param(
            {"allocations": (*FIRST_ALLOCATIONS, OTHER_TERM)}, id="another term"
        ),
    ],
)
def test_unlike_traces_have_no_model(changes):
    alike = [trace_of_blocks(size, EVEN_BLOCKS, events=[0, 1, 2]) for size in (3, 8)]
    assert fit_memory_model([*alike, LAST_TRACE]) is not None
    assert fit_memory_model([*alike, replace(LAST_TRACE, **changes)]) is None


def test_peak_on_cpu_is_highest_memory_use():
    model = fitted_model(
        Block(fixed_bytes=1000, bytes_per_sequence=0, term=Term.PARAMETERS),
        Block(fixed_bytes=0, bytes_per_sequence=10, term="activations"),
        Block(fixed_bytes=0, bytes_per_sequence=7, term="activations"),
        # The first activations are released (-2) before the second are made.
        events=[0, 1, -2, 2],
    )
    with_libraries = replace(ON_CPU, non_pytorch_bytes=9)
    assert peak_bytes(model, 5, ON_CPU) == 1000 + 5 * 10
    assert peak_bytes(model, 5, with_libraries) == 1000 + 5 * 10 + 9


def test_peak_on_gpu_is_reserve_of_allocator():
    model = fitted_model(
        Block(fixed_bytes=3 * MIB, bytes_per_sequence=0, term=Term.PARAMETERS),
        Block(fixed_bytes=0, bytes_per_sequence=17 * MIB, term="activations"),
    )
    overheads = replace(ON_GPU, workspaces_bytes=(32 * MIB,), non_pytorch_bytes=5)
    # In pages of 20 MiB: 32 + 3 + 17 MiB are three pages, 32 + 3 + 34 MiB are four.
    assert peak_bytes(model, 1, overheads) == 60 * MIB + 5
    assert peak_bytes(model, 2, overheads) == 80 * MIB + 5


def test_largest_parameter_is_a_single_one():
    model = fitted_model(
        Block(fixed_bytes=1000, bytes_per_sequence=0, term=Term.PARAMETERS),
        Block(fixed_bytes=900, bytes_per_sequence=0, term=Term.PARAMETERS),
        Block(fixed_bytes=5000, bytes_per_sequence=10, term="activations"),
    )
    assert model.largest_parameter_bytes == 1000


@settings(deadline=None)
@given(model=memory_models(), size=st.integers(1, 500), overheads=OVERHEADS)
def test_terms_add_up_to_the_peak(model, size, overheads):
    breakdown = memory_breakdown(model, size, overheads)
    assert sum(breakdown.terms_bytes.values()) == breakdown.peak_bytes
    assert breakdown.peak_bytes == peak_bytes(model, size, overheads)
    assert all(term_bytes > 0 for term_bytes in breakdown.terms_bytes.values())


@settings(deadline=None)
@given(model=memory_models(), size=st.integers(1, 500), overheads=OVERHEADS)
def test_overheads_are_terms_of_their_own(model, size, overheads):
    terms_bytes = memory_breakdown(model, size, overheads).terms_bytes
    workspaces_bytes = sum(overheads.workspaces_bytes)
    assert terms_bytes.get(Term.NON_PYTORCH, 0) == overheads.non_pytorch_bytes
    assert terms_bytes.get(Term.WORKSPACES, 0) == workspaces_bytes
    # A CPU's allocator is not replayed.
    if overheads.kind == "cpu":
        assert Term.ROUNDING not in terms_bytes


@settings(deadline=None)
@given(
    model=memory_models(),
    overheads=OVERHEADS,
    # From a budget that not even the smallest size fits, to one that all sizes fit.
    budget_share=st.floats(-0.1, 1.1),
    max_size=st.integers(1, MAX_MICRO_BATCH_SIZE),
)
def test_largest_micro_batch_is_the_largest_that_fits(
    model, overheads, budget_share, max_size
):
    sizes = range(1, max_size + 1)
    peaks = [peak_bytes(model, size, overheads) for size in sizes]
    budget_bytes = peaks[0] + budget_share * (peaks[-1] - peaks[0])
    fitting = [size for size in sizes if peaks[size - 1] <= budget_bytes]
    largest = largest_micro_batch_size(
        model, budget_bytes, overheads, max_micro_batch_size=max_size
    )
    assert largest == 0 or largest in fitting
    # The next size, whose peak is at this index, does not fit.
    assert largest == max_size or peaks[largest] > budget_bytes
    # By luck, more sequences may need less memory, if their blocks fit into each other
    # better. Then the sizes that fit are several ranges, and the end of one is found.
    if all(smaller <= larger for smaller, larger in pairwise(peaks)):
        # All sizes up to the largest one fit.
        assert largest == len(fitting)
