"""Selection of segments, as views or copies, and joining of segments."""

import numpy as np
import pytest

from trainer.data.segments import Segments


def segments_of(samples):
    """Return segments of samples that are alone in their sequences."""
    numbers = np.arange(len(samples))
    return Segments.from_arrays(
        sequences=numbers,
        positions=np.zeros_like(numbers),
        epochs=np.full_like(numbers, 3),
        samples=np.array(samples),
        shards=np.full_like(numbers, 1),
        begins=10 * numbers,
        tokens=np.full_like(numbers, 5),
    )


def test_properties_are_the_arrays_of_their_names():
    segments = segments_of([70, 80])
    assert segments.sequences.tolist() == [0, 1]
    assert segments.positions.tolist() == [0, 0]
    assert segments.epochs.tolist() == [3, 3]
    assert segments.samples.tolist() == [70, 80]
    assert segments.shards.tolist() == [1, 1]
    assert segments.begins.tolist() == [0, 10]
    assert segments.tokens.tolist() == [5, 5]


def test_slice_is_a_view():
    segments = segments_of([70, 80])
    segments[1:].samples[:] = 90
    assert segments.samples.tolist() == [70, 90]


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda segments: segments[np.array([False, True])], id="mask"),
        pytest.param(lambda segments: segments[np.array([1])], id="indices"),
        pytest.param(lambda segments: segments[1:].copy(), id="copy of a slice"),
        pytest.param(lambda segments: Segments.join([segments[1:]]), id="join"),
    ],
)
def test_other_selections_are_copies(select):
    segments = segments_of([70, 80])
    select(segments).samples[:] = 90
    assert segments.samples.tolist() == [70, 80]


def test_parts_are_joined_in_order():
    joined = Segments.join([segments_of([70, 80]), segments_of([60])])
    assert joined.samples.tolist() == [70, 80, 60]


def test_joining_no_parts_gives_no_segments():
    assert len(Segments.join([])) == 0
