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
def laws(draw) -> memory.MemoryModel:
    """Weights, then blocks that grow with rows or not, made and released in any
    order."""
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
    return simple_law(*blocks, events=events)


ON_CPU, ON_GPU = memory.MemoryOverheads(kind="cpu"), memory.MemoryOverheads(kind="cuda")
LARGE = replace(
    ON_GPU, workspaces_bytes=(32 * MIB, 32 * MIB), non_pytorch_bytes=600 * MIB
)
SURROUNDINGS = st.sampled_from(
    [ON_CPU, replace(ON_CPU, non_pytorch_bytes=38 * MIB), ON_GPU, LARGE]
)


def trace_of(
    rows: int, *blocks: tuple[int, int, str], events: list[int] | None = None
) -> Trace:
    """A trace of blocks given as fixed bytes, bytes per row and term."""
    allocations = tuple(
        Allocation(size_bytes=fixed + rows * by_row, term=term)
        for fixed, by_row, term in blocks
    )
    order = tuple(range(len(blocks)) if events is None else events)
    work = StepWork(
        micro_batch_size=rows, padded_tokens=rows, model_flops=0.0, kernels=()
    )
    return Trace(
        work=work,
        predicted_tokens=rows,
        allocations=allocations,
        events=order,
        repeats_from=0,
    )


def simple_law(
    *blocks: tuple[int, int, str], events: list[int] | None = None
) -> memory.MemoryModel:
    found = memory.fit_memory_model(
        [trace_of(rows, *blocks, events=events) for rows in (8, 3)]
    )
    assert found is not None
    return found


@given(rows=st.integers(1, 100))
def test_sizes_that_grow_evenly_are_exact_anywhere_and_others_where_traced_and_between_their_neighbours(
    rows,
):
    assert simple_law(*BLOCKS).sizes_bytes(200 * rows).tolist() == [
        100,
        4096 * 200 * rows,
        7 + 1024 * 200 * rows,
    ]

    def traced(rows: int) -> int:
        return 1000 * -(-rows // 7)

    model = memory.fit_memory_model(
        [trace_of(size, (traced(size), 0, Term.PARAMETERS)) for size in (40, 3, 11)]
    )
    assert model is not None
    (size,) = model.sizes_bytes(rows)
    if 3 <= rows <= 40:
        low, high = (
            max(n for n in (3, 11, 40) if n <= rows),
            min(n for n in (3, 11, 40) if n >= rows),
        )
        assert traced(low) <= size <= traced(high)
    assert size >= 0


BLOCKS = ((100, 0, Term.PARAMETERS), (0, 4096, "activations"), (7, 1024, "activations"))


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
def test_traces_that_are_not_alike_tell_no_law(change):
    *alike, last = (trace_of(rows, *BLOCKS) for rows in (3, 8, 24))
    assert memory.fit_memory_model([*alike, last]) is not None
    assert memory.fit_memory_model([*alike, replace(last, **change(last))]) is None


def test_the_peak_is_the_most_in_use_at_once_on_a_cpu_and_on_a_gpu_what_its_allocator_reserves():
    model = simple_law(
        (1000, 0, Term.PARAMETERS),
        (0, 10, "activations"),
        (0, 7, "activations"),
        events=[0, 1, -2, 2],
    )
    peaks = [
        memory.peak_bytes(model, 5, replace(ON_CPU, non_pytorch_bytes=outside))
        for outside in (0, 9)
    ]
    assert peaks == [1050, 1059]
    assert model.largest_parameter_bytes == 1000
    model = simple_law((3 * MIB, 0, Term.PARAMETERS), (0, 17 * MIB, "activations"))
    overheads = replace(ON_GPU, workspaces_bytes=(32 * MIB,), non_pytorch_bytes=5)
    # 32 + 3 + 17 MiB in pages of 20 MiB.
    assert [memory.peak_bytes(model, rows, overheads) for rows in (1, 2)] == [
        60 * MIB + 5,
        80 * MIB + 5,
    ]


@settings(deadline=None)
@given(model=laws(), rows=st.integers(1, 500), overheads=SURROUNDINGS)
def test_the_terms_of_the_ledger_add_up_to_the_peak(model, rows, overheads):
    found = memory.memory_breakdown(model, rows, overheads)
    assert (
        sum(found.terms_bytes.values())
        == found.peak_bytes
        == memory.peak_bytes(model, rows, overheads)
    )
    assert all(size > 0 for size in found.terms_bytes.values())
    assert found.terms_bytes.get(Term.NON_PYTORCH, 0) == overheads.non_pytorch_bytes
    assert found.terms_bytes.get(Term.WORKSPACES, 0) == sum(overheads.workspaces_bytes)
    if overheads.kind == "cpu":
        assert Term.ROUNDING not in found.terms_bytes


@settings(deadline=None)
@given(laws(), SURROUNDINGS, st.floats(-0.1, 1.1), st.integers(1, MAX_MICRO_BATCH_SIZE))
def test_the_largest_micro_batch_is_the_largest_of_all_that_fit(
    model, overheads, share, max_micro_batch_size
):
    peaks = [
        memory.peak_bytes(model, rows, overheads)
        for rows in range(1, max_micro_batch_size + 1)
    ]
    budget = peaks[0] + share * (peaks[-1] - peaks[0])
    fitting = [rows for rows, peak in enumerate(peaks, start=1) if peak <= budget]
    found = memory.largest_micro_batch_size(
        model, budget, overheads, max_micro_batch_size=max_micro_batch_size
    )
    assert found == 0 or found in fitting
    assert found == max_micro_batch_size or peaks[found] > budget
    # An allocator can need less for more rows, as blocks fit into each other by luck;
    # then it is the edge of one range.
    if all(one <= other for one, other in pairwise(peaks)):
        assert found == max(fitting, default=0)


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
def test_a_sequence_reserves_pages_of_2_mib_for_small_requests_and_of_20_for_others(
    sizes, events, reserved
):
    assert memory.reserve(sizes, events) == reserved


def with_released(
    page_mib: int, sizes_mib: list[int], released: list[int], **limits: int
) -> memory.Segment:
    """A segment of such blocks, of which those with these numbers were released."""
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
def test_the_free_block_that_is_taken_is_the_smallest_that_will_do(
    segment, size_mib, taken_mib
):
    assert [segment.allocate(size_mib * MIB) / MIB for _ in taken_mib] == taken_mib


@settings(deadline=None)
@given(
    sequence=SEQUENCES,
    page=st.sampled_from([2 * MIB, 20 * MIB]),
    seed=st.integers(0, 2**16),
)
def test_blocks_never_overlap_lie_within_what_is_reserved_and_leave_one_free_block_in_whatever_order_they_go(
    sequence, page, seed
):
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
