import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.streams import Lengths, all_ranks, check_places, make_plan, rows_of
from trainer.plan import MIN_BLOCK_SAMPLES, Segments
from trainer.stream import UNKNOWN, Position, RowStream, join_positions

LAYOUTS = st.sampled_from(["padded", "dynamic", "bucketed", "packed"])


@st.composite
def jobs(draw):
    """A dataset and a plan; some datasets fill several lanes and blocks."""
    samples = draw(st.one_of(st.integers(1, 80), st.integers(2000, 6000)))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 90, samples)
    rows = max(1, samples // draw(st.integers(1, 6)))
    return Lengths(lengths), {
        "seed": draw(st.integers(0, 9)),
        "layout": draw(LAYOUTS),
        "global_batch_rows": draw(st.integers(max(1, rows // 2), rows)),
        "accumulation_steps": draw(st.integers(1, 3)),
        "world_size": draw(st.integers(1, 9)),
    }


@settings(deadline=None, max_examples=60)
@given(job=jobs(), epochs=st.integers(1, 3))
def test_every_sample_comes_exactly_once_per_epoch_and_then_rows_are_empty(job, epochs):
    index, options = job
    plan = make_plan(index, max_epochs=epochs, **options)
    steps = -(-epochs * len(index) * 2 // plan.global_batch_rows) + 1
    found, _ = all_ranks(index, plan, steps)
    segments = Segments.join([part for step in found for part in step])
    for epoch in range(epochs):
        assert sorted(segments.samples[segments.epochs == epoch].tolist()) == list(range(len(index)))
    assert len(segments) == epochs * len(index)
    assert not any(len(part) for part in found[-1])


@settings(deadline=None, max_examples=60)
@given(job=jobs(), world=st.integers(1, 9), accumulation=st.integers(1, 4))
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_accumulation(job, world, accumulation):
    index, options = job
    one = all_ranks(index, make_plan(index, **options), 3)
    other = all_ranks(index, make_plan(index, **options | {"world_size": world, "accumulation_steps": accumulation}), 3)
    assert [rows_of(step) for step in one[0]] == [rows_of(step) for step in other[0]]
    assert one[1] == other[1]


@settings(deadline=None, max_examples=60)
@given(job=jobs(), before=st.integers(0, 4), world=st.integers(1, 9))
def test_a_job_that_goes_on_with_other_ranks_sees_what_it_would_have_seen(job, before, world):
    index, options = job
    plan = make_plan(index, **options)
    whole, end = all_ranks(index, plan, before + 2)
    _, position = all_ranks(index, plan, before)
    rest, rest_end = all_ranks(index, make_plan(index, **options | {"world_size": world}), 2, position)
    assert [rows_of(step) for step in whole[before:]] == [rows_of(step) for step in rest]
    assert end == rest_end


@settings(deadline=None, max_examples=60)
@given(job=jobs())
def test_ranks_get_disjoint_rows_in_their_places_and_differ_by_at_most_one_in_a_step(job):
    index, options = job
    plan = make_plan(index, **options)
    parts = plan.accumulation_steps
    for step in all_ranks(index, plan, 2)[0]:
        for segments in step:
            check_places(plan, segments)
        pairs = [(int(e), int(s)) for part in step for e, s in zip(part.epochs, part.samples, strict=True)]
        assert len(set(pairs)) == len(pairs)
        rows = [sum(len(np.unique(s.rows)) for s in step[r * parts : (r + 1) * parts]) for r in range(plan.world_size)]
        assert sum(rows) == plan.global_batch_rows
        assert max(rows) - min(rows) <= 1


def test_bucketed_rows_of_a_step_are_those_of_padded_and_alike_in_each_micro_batch():
    index = Lengths(np.random.default_rng(0).integers(1, 60, 9000))
    options = {"global_batch_rows": 256, "accumulation_steps": 8}
    padded, _ = all_ranks(index, make_plan(index, layout="padded", **options), 3)
    bucketed, _ = all_ranks(index, make_plan(index, layout="bucketed", **options), 3)
    assert [rows_of(step) for step in padded] == [rows_of(step) for step in bucketed]

    def waste(steps):
        widths = [(part.tokens.max(), part.tokens) for step in steps for part in step]
        return 1 - sum(t.sum() for _, t in widths) / sum(w * len(t) for w, t in widths)

    assert waste(bucketed) < waste(padded) / 3


def test_packing_real_like_lengths_leaves_less_than_half_a_per_cent_empty():
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(5.05, 1.3, 40_000)), 5000).astype(np.int64)
    index = Lengths(lengths)
    plan = make_plan(index, row_tokens=512, global_batch_rows=64, max_epochs=None)
    found, _ = all_ranks(index, plan, 200)
    real = sum(int((part.tokens + 2).sum()) for step in found for part in step)
    assert real / (200 * plan.slot_tokens) > 0.995


def test_a_position_says_which_block_and_row_of_each_lane_comes_next():
    index = Lengths(np.full(3 * MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(index, global_batch_rows=MIN_BLOCK_SAMPLES + 1)
    assert plan.lanes == 3
    _, position = all_ranks(index, plan, 4)
    assert position.rows == 4 * (MIN_BLOCK_SAMPLES + 1)
    # Every row holds one sample here; 2,052 rows, taken in turn from three lanes, are 684 of each: an epoch's two
    # blocks of 128 and 384, the next one's first of 128, and 44 rows of its second.
    assert [divmod(place, MIN_BLOCK_SAMPLES) for place in position.lanes] == [(3, 44)] * 3


@pytest.mark.parametrize(
    ("lengths", "rows", "lanes", "said"),
    [
        (np.ones(5000), 8, (2, 2, UNKNOWN, 2), "nothing of lane 2"),
        (np.full(1000, 30), 400, (400,), "row 400"),
    ],
    ids=["a lane is missing", "another plan's"],
)
def test_a_position_of_another_job_is_not_started_from(lengths, rows, lanes, said):
    index = Lengths(lengths)
    with pytest.raises(ValueError, match=said):
        next(iter(RowStream(make_plan(index), index, 0, Position(steps=1, rows=rows, lanes=lanes))))


def test_positions_of_different_steps_or_with_a_lane_missing_are_not_joined():
    with pytest.raises(ValueError, match="different steps"):
        join_positions([Position(steps=1, rows=8, lanes=(1,)), Position(steps=2, rows=16, lanes=(2,))])
    with pytest.raises(ValueError, match="no rank follows lane 1"):
        join_positions([Position(steps=1, rows=8, lanes=(1, UNKNOWN))])


def test_only_the_current_block_of_each_lane_is_located_again():
    class Counting(Lengths):
        located = 0

        def locate(self, samples):
            self.located += len(samples)
            return super().locate(samples)

    index = Counting(np.full(64 * MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(index, global_batch_rows=64)
    far = Position(steps=500, rows=32_000, lanes=(4000,) * plan.lanes)
    next(iter(RowStream(plan, index, 0, far)))
    # The current block of each lane, and the one that is packed ahead.
    assert index.located <= 2 * plan.lanes * MIN_BLOCK_SAMPLES
