import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.decide import memory_model as memory
from autotune.memory.decide.memory_model import LARGE_PAGE_BYTES, MIB, SMALL_PAGE_BYTES
from autotune.memory.values import Allocation, Term, Trace
from autotune.speed.values import StepWork

MAX_MICRO_BATCH_SIZE = 96
TERMS = ("activations", "optimizer", Term.PARAMETERS)


@st.composite
def memory_models(draw) -> memory.MemoryModel:
    """Draw a model: weights, then blocks that are made and released in any order."""
    count = draw(st.integers(2, 14))
    weights = draw(st.integers(1, count))
    sizes = st.sampled_from([0, 4, 512, 100_000, 3 * MIB, 30 * MIB])
    blocks, events = [], []
    live: list[int] = []
    for number in range(count):
        term = Term.PARAMETERS if number < weights else TERMS[number % 2]
        blocks.append(
            (draw(sizes), draw(st.sampled_from([0, 4, 2048, 100_000, 5 * MIB])), term)
        )
        while live and draw(st.booleans()):
            events.append(-1 - live.pop(draw(st.integers(0, len(live) - 1))))
        events.append(number)
        if number >= weights:
            live.append(number)
    return fitted_model(*blocks, events=events)


ON_CPU = memory.MemoryOverheads(kind="cpu")
ON_GPU = memory.MemoryOverheads(kind="cuda")
LARGE = replace(
    ON_GPU, workspaces_bytes=(32 * MIB, 32 * MIB), non_pytorch_bytes=600 * MIB
)
OVERHEADS = st.sampled_from(
    [ON_CPU, replace(ON_CPU, non_pytorch_bytes=38 * MIB), ON_GPU, LARGE]
)


def trace_of(
    size: int, *blocks: tuple[int, int, str], events: list[int] | None = None
) -> Trace:
    """Return a trace of blocks: fixed bytes, bytes per sequence, and term of each."""
    allocations = tuple(
        Allocation(size_bytes=fixed + size * by_sequence, term=term)
        for fixed, by_sequence, term in blocks
    )
    order = tuple(range(len(blocks)) if events is None else events)
    work = StepWork(
        micro_batch_size=size, padded_tokens=size, model_flops=0.0, kernels=()
    )
    return Trace(
        work=work,
        predicted_tokens=size,
        allocations=allocations,
        events=order,
        repeats_from=0,
    )


def fitted_model(
    *blocks: tuple[int, int, str], events: list[int] | None = None
) -> memory.MemoryModel:
    model = memory.fit_memory_model(
        [trace_of(size, *blocks, events=events) for size in (8, 3)]
    )
    assert model is not None
    return model


BLOCKS = ((100, 0, Term.PARAMETERS), (0, 4096, "activations"), (7, 1024, "activations"))
TRACED_SIZES = (40, 3, 11)


@given(size=st.integers(1, 100))
def test_evenly_growing_sizes_are_exact(size):
    large = 200 * size
    sizes = fitted_model(*BLOCKS).sizes_bytes(large).tolist()
    assert sizes == [100, 4096 * large, 7 + 1024 * large]


@given(size=st.integers(1, 100))
def test_other_sizes_lie_between_their_neighbours(size):
    def traced_bytes(traced_size: int) -> int:
        return 1000 * -(-traced_size // 7)

    model = memory.fit_memory_model(
        [
            trace_of(traced_size, (traced_bytes(traced_size), 0, Term.PARAMETERS))
            for traced_size in TRACED_SIZES
        ]
    )
    assert model is not None
    (size_bytes,) = model.sizes_bytes(size)
    assert size_bytes >= 0
    if 3 <= size <= 40:
        below = max(traced_size for traced_size in TRACED_SIZES if traced_size <= size)
        above = min(traced_size for traced_size in TRACED_SIZES if traced_size >= size)
        assert traced_bytes(below) <= size_bytes <= traced_bytes(above)


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: {"events": (0, 2, 1)},
        lambda trace: {"events": (0, 1, 2, -3)},
        lambda trace: {"allocations": trace.allocations[:2], "events": (0, 1)},
        lambda trace: {
            "allocations": (
                *trace.allocations[:2],
                replace(trace.allocations[2], term="x"),
            )
        },
    ],
    ids=["order", "released", "fewer", "another's"],
)
def test_unlike_traces_have_no_model(change):
    *alike, last = (trace_of(size, *BLOCKS) for size in (3, 8, 24))
    assert memory.fit_memory_model([*alike, last]) is not None
    assert memory.fit_memory_model([*alike, replace(last, **change(last))]) is None


def test_peak_on_a_cpu_is_the_most_in_use():
    model = fitted_model(
        (1000, 0, Term.PARAMETERS),
        (0, 10, "activations"),
        (0, 7, "activations"),
        events=[0, 1, -2, 2],
    )
    with_libraries = replace(ON_CPU, non_pytorch_bytes=9)
    assert memory.peak_bytes(model, 5, ON_CPU) == 1050
    assert memory.peak_bytes(model, 5, with_libraries) == 1059
    assert model.largest_parameter_bytes == 1000


def test_peak_on_a_gpu_is_what_the_allocator_reserves():
    model = fitted_model((3 * MIB, 0, Term.PARAMETERS), (0, 17 * MIB, "activations"))
    overheads = replace(ON_GPU, workspaces_bytes=(32 * MIB,), non_pytorch_bytes=5)
    # 32 + 3 + 17 MiB in pages of 20 MiB.
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


SIZES = st.one_of(*(st.integers(1, most) for most in (64, 4 * MIB, 64 * MIB))).map(
    memory.rounded_bytes
)
SEQUENCES = st.lists(
    st.tuples(SIZES, st.booleans(), st.integers(0, 2**16)), min_size=1, max_size=60
)
"""Sizes; whether a block is released before; which."""


@pytest.mark.parametrize(
    ("sizes", "events", "reserved"),
    [
        ([0], [0], 0),
        ([512], [0], SMALL_PAGE_BYTES),
        ([MIB], [0], SMALL_PAGE_BYTES),
        ([MIB + 1], [0], LARGE_PAGE_BYTES),
        ([20 * MIB], [0], LARGE_PAGE_BYTES),
        ([20 * MIB + 1], [0], 2 * LARGE_PAGE_BYTES),
        # Segments of their own.
        ([2 * MIB, 100], [0, 1], LARGE_PAGE_BYTES + SMALL_PAGE_BYTES),
        ([MIB - 512, 1, 1], [0, 1, 2], SMALL_PAGE_BYTES),  # rounded up to 512 bytes
        ([2 * MIB - 512, 1], [0, 1], LARGE_PAGE_BYTES + SMALL_PAGE_BYTES),
        # Its largest moment, and keeps it.
        ([60 * MIB, 20 * MIB, 2 * MIB], [0, 1, -1, -2, 2], 80 * MIB),
        ([20 * MIB, 60 * MIB], [0, -1, 1], 60 * MIB),
        ([60 * MIB, 20 * MIB], [0, -1, 1], 60 * MIB),
        ([0, 20 * MIB], [0, 1, -1, -2], 20 * MIB),
        # It grows by what its last free block lacks.
        ([6 * MIB, 16 * MIB], [0, 1], 40 * MIB),
    ],
)
def test_requests_reserve_whole_pages(sizes, events, reserved):
    assert memory.reserve(sizes, events) == reserved


def with_released(
    page_mib: int, sizes_mib: list[int], released: list[int], **limits: int
) -> memory.Segment:
    """Return a segment of blocks, of which those with these numbers are released."""
    segment = memory.Segment(page_mib * MIB, **limits)
    blocks = [(segment.allocate(size * MIB), size * MIB) for size in sizes_mib]
    for number in released:
        segment.release(*blocks[number])
    return segment


@pytest.mark.parametrize(
    ("segment", "size_mib", "taken_mib"),
    [
        # The smallest that is large enough.
        (with_released(1, [4, 1, 3, 1], [0, 2]), 3, [5, 0]),
        # The last one only if no other will do.
        (with_released(8, [5, 1], [0]), 2, [0, 2, 6]),
        # The last counts as what it could grow to.
        (with_released(10, [40, 5], [0], address_bytes=100 * MIB), 1, [0]),
        (with_released(10, [40, 5], [0], address_bytes=60 * MIB), 1, [45]),
    ],
)
def test_smallest_sufficient_block_is_taken(segment, size_mib, taken_mib):
    assert [segment.allocate(size_mib * MIB) / MIB for _ in taken_mib] == taken_mib


@settings(deadline=None)
@given(
    sequence=SEQUENCES,
    page=st.sampled_from([2 * MIB, 20 * MIB]),
    seed=st.integers(0, 2**16),
)
def test_blocks_never_overlap(sequence, page, seed):
    segment = memory.Segment(page)
    live: list[tuple[int, int]] = []
    reserved = 0
    for size, releases, which in sequence:
        if releases and live:
            segment.release(*live.pop(which % len(live)))
        live.append((segment.allocate(size), size))
        assert all(
            before[0] + before[1] <= after[0]
            for before, after in pairwise(sorted(live))
        )
        assert max(address + held for address, held in live) <= segment.reserved_bytes
        assert segment.reserved_bytes >= reserved
        assert segment.reserved_bytes % page == 0
        reserved = segment.reserved_bytes
    random.Random(seed).shuffle(live)
    for block in live:
        segment.release(*block)
    assert (segment.allocate(reserved), segment.reserved_bytes) == (0, reserved)
