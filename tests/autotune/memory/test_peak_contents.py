"""Contents of memory at the peak, from logs of allocations."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.evidence.peak_contents import (
    NO_MODULE,
    ContentKind,
    PeakContents,
)
from autotune.memory.decide.allocator_history import HistoryEntry, complete_events
from autotune.memory.decide.module_groups import group_modules
from autotune.memory.decide.peak_contents import (
    Allocated,
    BackwardReached,
    Held,
    Label,
    Labelled,
    Position,
    RecomputationEnded,
    Refused,
    Released,
    StepLog,
    contents_at_peak,
)

FORWARD = Position(phase="forward", module="layer", operator="addmm", operator_call=1)
BACKWARD = Position(phase="backward", module="layer", operator="mm", operator_call=2)
RECOMPUTED = Position(phase="backward", module="layer", is_recomputation=True)
UPDATE = Position(phase="optimizer step", operator="mul")


def allocated(address, size_bytes, position=FORWARD, total_bytes=None):
    return Allocated(
        address=address,
        size_bytes=size_bytes,
        position=position,
        total_bytes=total_bytes,
    )


def contents_of(*events, held=None, **log) -> PeakContents:
    return contents_at_peak(StepLog(held=held or {}, events=events, **log), "cpu")


def test_forward_results_alive_in_backward_are_activations():
    contents = contents_of(
        allocated(1, 10),
        allocated(2, 20),
        Released(address=2),
        BackwardReached(),
        allocated(3, 30, BACKWARD),
        Released(address=1),
    )
    assert contents.peak_bytes == 40
    assert contents.phase == "backward"
    assert contents.bytes_by_kind == {
        ContentKind.ACTIVATIONS: 10,
        ContentKind.TEMPORARIES: 30,
    }


def test_label_tells_the_whole_life_of_a_gradient():
    contents = contents_of(
        BackwardReached(),
        allocated(1, 10, BACKWARD),
        allocated(2, 30, BACKWARD),
        Released(address=2),
        Labelled(
            address=1,
            label=Label(kind=ContentKind.GRADIENTS, module="head", shape=(5,)),
        ),
    )
    [row] = [row for row in contents.rows if row.module == "head"]
    assert row.bytes_by_kind == {ContentKind.GRADIENTS: 10}
    assert contents.largest[1].shape == [5]


def test_recomputed_results_are_activations_again():
    contents = contents_of(
        BackwardReached(),
        allocated(1, 10, RECOMPUTED),
        allocated(2, 5, RECOMPUTED),
        Released(address=2),
        RecomputationEnded(),
        allocated(3, 7, BACKWARD),
        Released(address=1),
    )
    assert contents.bytes_by_kind == {
        ContentKind.ACTIVATIONS: 10,
        ContentKind.TEMPORARIES: 7,
    }


def test_optimizer_allocations_are_temporaries():
    contents = contents_of(BackwardReached(), allocated(1, 10, UPDATE))
    assert contents.bytes_by_kind == {ContentKind.TEMPORARIES: 10}
    assert contents.rows[0].module == NO_MODULE


def test_refused_allocation_shows_what_was_alive():
    refused = Position(
        phase="forward", module="head", operator="addmm", operator_call=9
    )
    contents = contents_of(
        allocated(1, 10),
        allocated(2, 4, refused),
        Refused(position=refused, input_shapes=((3, 4),)),
        Released(address=1),
        allocated(3, 100),
        ran_out_of_memory=True,
        refused_bytes=1000,
    )
    assert contents.peak_bytes == 14
    # Backward may need the first one; the refused operator made the second one.
    assert contents.bytes_by_kind == {
        ContentKind.ACTIVATIONS: 10,
        ContentKind.TEMPORARIES: 4,
    }
    assert contents.refused.size_bytes == 1000
    assert contents.refused.module == "head"
    assert contents.refused.input_shapes == [[3, 4]]


def test_survived_refusal_does_not_count():
    contents = contents_of(allocated(1, 10), Refused(position=FORWARD))
    assert contents.refused is None
    assert contents.peak_bytes == 10


def test_allocator_total_leaves_a_remainder():
    contents = contents_of(
        allocated(1, 10, total_bytes=25), held={5: Held(size_bytes=8)}
    )
    assert contents.peak_bytes == 25
    assert contents.not_attributed_bytes == 7


def test_allocation_at_the_same_address_replaces():
    contents = contents_of(allocated(1, 10), allocated(1, 12))
    assert contents.peak_bytes == 12


EVENTS = st.one_of(
    st.builds(
        allocated,
        st.integers(1, 5),
        st.integers(1, 100),
        st.sampled_from([FORWARD, BACKWARD, RECOMPUTED, UPDATE]),
    ),
    st.builds(Released, address=st.integers(1, 5)),
    st.builds(BackwardReached),
    st.builds(RecomputationEnded),
    st.builds(Refused, position=st.just(FORWARD)),
    st.builds(
        Labelled,
        address=st.integers(1, 5),
        label=st.builds(
            Label, kind=st.sampled_from([None, *ContentKind]), module=st.just("owner")
        ),
    ),
)


@given(
    st.lists(EVENTS, max_size=30),
    st.dictionaries(st.integers(1, 9), st.builds(Held, size_bytes=st.integers(1, 50))),
    st.booleans(),
)
def test_contents_sum_to_the_highest_total(events, held, refused):
    contents = contents_of(*events, held=held, ran_out_of_memory=refused)
    live = {address: block.size_bytes for address, block in held.items()}
    totals = [sum(live.values())]
    at_refusal = None
    for event in events:
        if isinstance(event, Allocated):
            live[event.address] = event.size_bytes
        elif isinstance(event, Released):
            live.pop(event.address, None)
        elif isinstance(event, Refused):
            at_refusal = sum(live.values())
        totals.append(sum(live.values()))
    expected = max(totals)
    if refused and at_refusal is not None:
        expected = at_refusal
    assert contents.peak_bytes == expected
    assert sum(contents.bytes_by_kind.values()) == expected
    assert contents.not_attributed_bytes == 0
    again = PeakContents.model_validate(contents.model_dump(mode="json"))
    assert again == contents


def test_history_adds_releases_of_other_threads():
    events = [
        allocated(1, 10, total_bytes=10),
        allocated(2, 20, total_bytes=30),
        allocated(3, 5, total_bytes=25),
        Released(address=2, total_bytes=5),
    ]
    history = [
        HistoryEntry(address=1, size_bytes=10, is_release=False),
        HistoryEntry(address=2, size_bytes=20, is_release=False),
        HistoryEntry(address=1, size_bytes=10, is_release=True),
        HistoryEntry(address=3, size_bytes=5, is_release=False),
        HistoryEntry(address=2, size_bytes=20, is_release=True),
    ]
    complete = complete_events(events, history)
    assert complete == [*events[:2], Released(address=1), *events[2:]]
    assert contents_of(*events).peak_bytes == 30


def test_allocation_of_another_thread_has_no_module():
    history = [
        HistoryEntry(address=7, size_bytes=50, is_release=False),
        HistoryEntry(address=1, size_bytes=10, is_release=False),
    ]
    complete = complete_events([allocated(1, 10)], history)
    contents = contents_of(*complete)
    [row] = [row for row in contents.rows if row.module == NO_MODULE]
    assert row.size_bytes == 50


def test_release_that_was_missed_is_told():
    contents = contents_of(
        allocated(1, 10, total_bytes=10), allocated(2, 20, total_bytes=20)
    )
    assert contents.peak_bytes == 20
    assert contents.missed_releases_bytes == 10


@given(st.lists(EVENTS, max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_history_restores_what_a_profile_lacks(events, is_profiled):
    live = set()
    history = []
    profiled = []
    for event, is_seen in zip(events, is_profiled, strict=False):
        is_release = isinstance(event, Released)
        if not isinstance(event, Allocated | Released):
            continue
        # An address is allocated and released in turns.
        if is_release != (event.address in live):
            continue
        live ^= {event.address}
        size_bytes = 0 if is_release else event.size_bytes
        history.append(
            HistoryEntry(
                address=event.address, size_bytes=size_bytes, is_release=is_release
            )
        )
        if is_seen:
            profiled.append(event)
    complete = complete_events(profiled, history)
    alive = set()
    for event in complete:
        if isinstance(event, Allocated):
            assert event.address not in alive
            alive.add(event.address)
        else:
            alive.remove(event.address)
    assert alive == live


CLASSES = {
    "encoder": "Encoder",
    "encoder.layers": "ModuleList",
    "encoder.layers.0": "Layer",
    "encoder.layers.1": "Layer",
    "encoder.layers.0.up": "Linear",
    "encoder.layers.1.up": "Linear",
    "head.0": "Linear",
    "head.1": "GELU",
}


def sizes_of(*names):
    return {name: {ContentKind.PARAMETERS: 1} for name in names}


def test_equal_layers_are_one_group():
    groups = group_modules(
        sizes_of("encoder.layers.0.up", "encoder.layers.1.up"), CLASSES, 10
    )
    assert [(group.title, group.size_bytes) for group in groups] == [
        ("encoder.layers.*.up (2)", 2)
    ]


def test_different_parts_of_a_sequence_stay_apart():
    groups = group_modules(sizes_of("head.0", "head.1"), CLASSES, 10)
    assert [group.title for group in groups] == ["head.0", "head.1"]


def test_smallest_groups_join_their_container():
    names = ("encoder.layers.0.up", "encoder.layers.1.up", "head.1", "head.2")
    sizes = sizes_of(*names) | {"head.0": {ContentKind.ACTIVATIONS: 100}}
    groups = group_modules(sizes, CLASSES, 3)
    titles = {group.title: group.size_bytes for group in groups}
    assert titles == {"head.0": 100, "encoder.layers.*.up (2)": 2, "head": 2}


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "0", "1"]), min_size=1, max_size=4).map(
            ".".join
        ),
        st.dictionaries(st.sampled_from(list(ContentKind)), st.integers(1, 99)),
    ),
    st.integers(1, 6),
)
def test_groups_keep_every_byte(sizes, max_groups):
    groups = group_modules(sizes, {}, max_groups)
    total = sum(sum(parts.values()) for parts in sizes.values())
    assert sum(group.size_bytes for group in groups) == total
    roots = {name.partition(".")[0] for name in sizes}
    assert len(groups) <= max(max_groups, len(roots))
