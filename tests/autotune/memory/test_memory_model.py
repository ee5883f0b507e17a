import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.decide import memory_model as memory
from autotune.memory.decide.batch_search import MIB
from autotune.memory.decide.overheads import MemoryOverheads
from autotune.memory.values import Allocation, Term, Trace
from tests.autotune.memory.simulated_traces import trace_of

MAX_MICRO_BATCH_SIZE = 96
TERMS = ("activations", "optimizer")


class Block(NamedTuple):
    """A block that grows evenly with the micro-batch size."""

    fixed_bytes: int
    bytes_per_sequence: int
    term: str


def trace_of_blocks(size: int, blocks: Sequence[Block], events: Sequence[int]) -> Trace:
    allocations = [
        Allocation(
            size_bytes=block.fixed_bytes + size * block.bytes_per_sequence,
            term=block.term,
        )
        for block in blocks
    ]
    return trace_of(size, allocations, events)


def fitted_model(
    *blocks: Block, events: Sequence[int] | None = None
) -> memory.MemoryModel:
    """Return the model of blocks that are made in turn, unless ``events`` are given."""
    if events is None:
        events = range(len(blocks))
    model = memory.fit_memory_model(
        [trace_of_blocks(size, blocks, events) for size in (8, 3)]
    )
    assert model is not None
    return model


@st.composite
def memory_models(draw) -> memory.MemoryModel:
    """Draw a model: weights, then blocks that are made and released in any order."""
    count = draw(st.integers(2, 14))
    weights = draw(st.integers(1, count))
    # Empty, small and large requests of the allocator.
    fixed_sizes = st.sampled_from([0, 4, 512, 100_000, 3 * MIB, 30 * MIB])
    sizes_by_sequence = st.sampled_from([0, 4, 2048, 100_000, 5 * MIB])
    blocks = []
    events = []
    live: list[int] = []
    for number in range(count):
        term = Term.PARAMETERS if number < weights else TERMS[number % 2]
        blocks.append(Block(draw(fixed_sizes), draw(sizes_by_sequence), term))
        while live and draw(st.booleans()):
            events.append(-1 - live.pop(draw(st.integers(0, len(live) - 1))))
        events.append(number)
        if number >= weights:
            live.append(number)
    return fitted_model(*blocks, events=events)


ON_CPU = MemoryOverheads(kind="cpu")
ON_GPU = MemoryOverheads(kind="cuda")
LARGE = replace(
    ON_GPU, workspaces_bytes=(32 * MIB, 32 * MIB), non_pytorch_bytes=600 * MIB
)
OVERHEADS = st.sampled_from(
    [ON_CPU, replace(ON_CPU, non_pytorch_bytes=38 * MIB), ON_GPU, LARGE]
)
BLOCKS = (
    Block(100, 0, Term.PARAMETERS),
    Block(0, 4096, "activations"),
    Block(7, 1024, "activations"),
)
UNEVEN_SIZES = (3, 11, 40)


@given(size=st.integers(1, 100))
def test_evenly_growing_sizes_are_exact(size):
    large = 200 * size
    sizes = fitted_model(*BLOCKS).sizes_bytes(large).tolist()
    assert sizes == [100, 4096 * large, 7 + 1024 * large]


def uneven_bytes(size: int) -> int:
    """Return the size of a block that grows by 1,000 bytes every seven sequences."""
    return 1000 * math.ceil(size / 7)


@given(size=st.integers(1, 100))
def test_other_sizes_lie_between_their_neighbours(size):
    # Traces may be in any order.
    traces = [
        trace_of(
            traced_size,
            [Allocation(size_bytes=uneven_bytes(traced_size), term=Term.PARAMETERS)],
            [0],
        )
        for traced_size in (40, 3, 11)
    ]
    model = memory.fit_memory_model(traces)
    assert model is not None
    (size_bytes,) = model.sizes_bytes(size)
    assert size_bytes >= 0
    if UNEVEN_SIZES[0] <= size <= UNEVEN_SIZES[-1]:
        below = max(traced for traced in UNEVEN_SIZES if traced <= size)
        above = min(traced for traced in UNEVEN_SIZES if traced >= size)
        assert uneven_bytes(below) <= size_bytes <= uneven_bytes(above)


LAST_TRACE = trace_of_blocks(24, BLOCKS, [0, 1, 2])
OTHER_TERM = replace(LAST_TRACE.allocations[2], term="another")


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param({"events": (0, 2, 1)}, id="another order"),
        pytest.param({"events": (0, 1, 2, -3)}, id="a release more"),
        pytest.param(
            {"allocations": LAST_TRACE.allocations[:2], "events": (0, 1)},
            id="a block less",
        ),
        pytest.param(
            {"allocations": (*LAST_TRACE.allocations[:2], OTHER_TERM)},
            id="another term",
        ),
    ],
)
def test_unlike_traces_have_no_model(unlike):
    alike = [trace_of_blocks(size, BLOCKS, [0, 1, 2]) for size in (3, 8)]
    assert memory.fit_memory_model([*alike, LAST_TRACE]) is not None
    assert memory.fit_memory_model([*alike, replace(LAST_TRACE, **unlike)]) is None


def test_peak_on_a_cpu_is_the_most_in_use():
    model = fitted_model(
        Block(1000, 0, Term.PARAMETERS),
        Block(0, 10, "activations"),
        Block(0, 7, "activations"),
        events=[0, 1, -2, 2],
    )
    with_libraries = replace(ON_CPU, non_pytorch_bytes=9)
    # The parameters, and the larger of two activations that never exist together.
    assert memory.peak_bytes(model, 5, ON_CPU) == 1000 + 5 * 10
    assert memory.peak_bytes(model, 5, with_libraries) == 1000 + 5 * 10 + 9
    assert model.largest_parameter_bytes == 1000


def test_peak_on_a_gpu_is_what_the_allocator_reserves():
    model = fitted_model(
        Block(3 * MIB, 0, Term.PARAMETERS), Block(0, 17 * MIB, "activations")
    )
    overheads = replace(ON_GPU, workspaces_bytes=(32 * MIB,), non_pytorch_bytes=5)
    # 32 + 3 + 17 MiB, or twice 17 MiB, in pages of 20 MiB.
    assert memory.peak_bytes(model, 1, overheads) == 60 * MIB + 5
    assert memory.peak_bytes(model, 2, overheads) == 80 * MIB + 5


@settings(deadline=None)
@given(model=memory_models(), size=st.integers(1, 500), overheads=OVERHEADS)
def test_terms_add_up_to_the_peak(model, size, overheads):
    breakdown = memory.memory_breakdown(model, size, overheads)
    assert (
        sum(breakdown.terms_bytes.values())
        == breakdown.peak_bytes
        == memory.peak_bytes(model, size, overheads)
    )
    assert all(size > 0 for size in breakdown.terms_bytes.values())
    assert breakdown.terms_bytes.get(Term.NON_PYTORCH, 0) == overheads.non_pytorch_bytes
    assert breakdown.terms_bytes.get(Term.WORKSPACES, 0) == sum(
        overheads.workspaces_bytes
    )
    if overheads.kind == "cpu":
        assert Term.ROUNDING not in breakdown.terms_bytes


@settings(deadline=None)
@given(
    memory_models(),
    OVERHEADS,
    st.floats(-0.1, 1.1),
    st.integers(1, MAX_MICRO_BATCH_SIZE),
)
def test_largest_micro_batch_is_the_largest_that_fits(
    model, overheads, share, max_micro_batch_size
):
    peaks = [
        memory.peak_bytes(model, size, overheads)
        for size in range(1, max_micro_batch_size + 1)
    ]
    budget = peaks[0] + share * (peaks[-1] - peaks[0])
    fitting = [size for size, peak in enumerate(peaks, start=1) if peak <= budget]
    largest = memory.largest_micro_batch_size(
        model, budget, overheads, max_micro_batch_size=max_micro_batch_size
    )
    assert largest == 0 or largest in fitting
    assert largest == max_micro_batch_size or peaks[largest] > budget
    # An allocator can need less for more sequences, as blocks fit into each other by
    # luck; then it is the edge of one range.
    if all(smaller <= larger for smaller, larger in pairwise(peaks)):
        assert largest == max(fitting, default=0)
