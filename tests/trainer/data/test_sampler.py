import itertools
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, micro_batches
from trainer.data import batch_plan
from trainer.data.global_batch import sequence_statistics, with_batch_in_sequences
from trainer.data.sampler import UNKNOWN, Position, SequenceSampler, join_positions

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
        "global_batch_size": draw(st.integers(max(1, rows // 2), rows)),
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "world_size": draw(st.integers(1, 9)),
    }


@settings(deadline=None, max_examples=60)
@given(job=jobs(), epochs=st.integers(1, 3))
def test_every_sample_comes_exactly_once_per_epoch_and_then_rows_are_empty(job, epochs):
    index, options = job
    plan = make_plan(index, max_epochs=epochs, **options)
    steps = -(-epochs * len(index) * 2 // plan.global_batch_size) + 1
    found, _ = all_ranks(index, plan, steps)
    segments = batch_plan.Segments.join([part for step in found for part in step])
    for epoch in range(epochs):
        assert sorted(segments.samples[segments.epochs == epoch].tolist()) == list(
            range(len(index))
        )
    assert len(segments) == epochs * len(index)
    assert not any(len(part) for part in found[-1])


@settings(deadline=None, max_examples=60)
@given(
    job=jobs(),
    before=st.integers(0, 4),
    world=st.integers(1, 9),
    accumulation=st.integers(1, 4),
)
def test_a_job_that_begins_or_goes_on_with_other_ranks_sees_what_it_would_have_seen(
    job, before, world, accumulation
):
    index, options = job
    plan = make_plan(index, **options)
    whole, end = all_ranks(index, plan, before + 2)
    _, position = all_ranks(index, plan, before)
    other = make_plan(
        index,
        **options | {"world_size": world, "gradient_accumulation_steps": accumulation},
    )
    rest, rest_end = all_ranks(index, other, 2, position)
    assert [rows_of(step) for step in whole[before:]] == [
        rows_of(step) for step in rest
    ]
    assert end == rest_end


@settings(deadline=None, max_examples=60)
@given(job=jobs())
def test_ranks_get_disjoint_rows_of_samples_cut_to_them_and_differ_by_at_most_one_in_a_step(
    job,
):
    index, options = job
    plan = make_plan(index, **options)
    parts = plan.gradient_accumulation_steps
    for step in all_ranks(index, plan, 2)[0]:
        for segments in step:
            check_places(plan, segments)
            assert (
                segments.tokens == np.minimum(index.locate(segments.samples)[2], 62)
            ).all()
            assert options["layout"] == "packed" or not segments.columns.any()
        pairs = [
            (int(e), int(s))
            for part in step
            for e, s in zip(part.epochs, part.samples, strict=True)
        ]
        assert len(set(pairs)) == len(pairs)
        rows = [
            sum(len(np.unique(s.rows)) for s in step[r * parts : (r + 1) * parts])
            for r in range(plan.world_size)
        ]
        assert sum(rows) == plan.global_batch_size
        assert max(rows) - min(rows) <= 1


def test_bucketed_rows_of_a_step_are_those_of_padded_and_alike_in_each_micro_batch():
    index = Lengths(np.random.default_rng(0).integers(1, 60, 9000))
    options = {"global_batch_size": 256, "gradient_accumulation_steps": 8}
    padded, _ = all_ranks(index, make_plan(index, layout="padded", **options), 3)
    bucketed, _ = all_ranks(index, make_plan(index, layout="bucketed", **options), 3)
    assert [rows_of(step) for step in padded] == [rows_of(step) for step in bucketed]

    def waste(steps):
        widths = [(part.tokens.max(), part.tokens) for step in steps for part in step]
        return 1 - sum(t.sum() for _, t in widths) / sum(w * len(t) for w, t in widths)

    assert waste(bucketed) < waste(padded) / 3


def test_packing_real_like_lengths_leaves_less_than_half_a_per_cent_empty():
    index = Lengths(
        np.minimum(
            np.exp(np.random.default_rng(0).normal(5.05, 1.3, 40_000)), 5000
        ).astype(np.int64)
    )
    plan = make_plan(
        index, seq_length_tokens=512, global_batch_size=64, max_epochs=None
    )
    found, _ = all_ranks(index, plan, 200)
    real = sum(int((part.tokens + 2).sum()) for step in found for part in step)
    assert real / (200 * plan.padded_tokens) > 0.995


def test_a_position_says_which_block_and_row_of_each_lane_comes_next():
    index = Lengths(np.full(3 * batch_plan.MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(index, global_batch_size=batch_plan.MIN_BLOCK_SAMPLES + 1)
    assert plan.lanes == 3
    _, position = all_ranks(index, plan, 4)
    assert position.rows == 4 * (batch_plan.MIN_BLOCK_SAMPLES + 1)
    # Every row holds one sample here; 2,052 rows, taken in turn from three lanes, are
    # 684 of each: an epoch's two blocks of 128 and 384, the next one's first of 128,
    # and 44 rows of its second.
    assert [
        divmod(place, batch_plan.MIN_BLOCK_SAMPLES) for place in position.lanes
    ] == [(3, 44)] * 3


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
        next(
            iter(
                SequenceSampler(
                    make_plan(index),
                    index,
                    0,
                    Position(steps=1, rows=rows, lanes=lanes),
                )
            )
        )


def test_positions_of_different_steps_or_with_a_lane_missing_are_not_joined():
    with pytest.raises(ValueError, match="different steps"):
        join_positions(
            [
                Position(steps=1, rows=8, lanes=(1,)),
                Position(steps=2, rows=16, lanes=(2,)),
            ]
        )
    with pytest.raises(ValueError, match="no rank follows lane 1"):
        join_positions([Position(steps=1, rows=8, lanes=(1, UNKNOWN))])


def test_only_the_current_block_of_each_lane_is_located_again():
    class Counting(Lengths):
        located = 0

        def locate(self, samples):
            self.located += len(samples)
            return super().locate(samples)

    index = Counting(np.full(64 * batch_plan.MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(index, global_batch_size=64)
    next(
        iter(
            SequenceSampler(
                plan,
                index,
                0,
                Position(steps=500, rows=32_000, lanes=(4000,) * plan.lanes),
            )
        )
    )
    # The current block of each lane, and the one that is packed ahead.
    assert index.located <= 2 * plan.lanes * batch_plan.MIN_BLOCK_SAMPLES


class Lengths:
    """A sample index over a list of lengths, all in one shard."""

    def __init__(self, lengths: list[int] | np.ndarray) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def announce(self, samples: Callable[[], np.ndarray]) -> None:
        """Everything is here already."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.zeros_like(samples), self._begins[samples], self._lengths[samples]


def make_plan(index: Lengths, **options) -> batch_plan.BatchPlan:
    defaults = {
        "seed": 0,
        "seq_length_tokens": 64,
        "layout": "packed",
        "global_batch_size": 8,
    }
    defaults |= {"gradient_accumulation_steps": 1, "world_size": 1}
    return batch_plan.BatchPlan(dataset_samples=len(index), **defaults | options)


def all_ranks(
    index: Lengths,
    plan: batch_plan.BatchPlan,
    steps: int,
    position: Position | None = None,
) -> tuple[list[list[batch_plan.Segments]], Position]:
    """The segments of every step, one array per micro-batch of every rank; and where
    the job is then."""
    found: list[list[batch_plan.Segments]] = [[] for _ in range(steps)]
    ends = []
    for rank in range(plan.world_size):
        stream = SequenceSampler(plan, index, rank, position)
        last = None
        for number, micro_batch in enumerate(
            islice(stream, steps * plan.gradient_accumulation_steps)
        ):
            found[number // plan.gradient_accumulation_steps].append(
                micro_batch.segments
            )
            last = micro_batch.after
        ends.append(last or position or Position.start(plan))
    return found, join_positions(ends)


def rows_of(
    micro_batches: list[batch_plan.Segments],
) -> list[list[tuple[int, int, int, int]]]:
    """The content of every row of some micro-batches, whatever its number: (epoch,
    sample, column, tokens) of each."""
    rows = []
    for segments in micro_batches:
        for row in np.unique(segments.rows):
            inside = segments[segments.rows == row]
            fields = (inside.epochs, inside.samples, inside.columns, inside.tokens)
            rows.append(list(zip(*(field.tolist() for field in fields), strict=True)))
    return sorted(rows)


def check_places(plan: batch_plan.BatchPlan, segments: batch_plan.Segments) -> None:
    """Samples lie within their rows, in order, without overlap or gap."""
    lengths = segments.tokens + batch_plan.SPECIAL_TOKENS_PER_SAMPLE
    assert (segments.rows >= 0).all()
    assert (segments.rows < plan.sequences_per_micro_batch).all()
    assert (segments.columns + lengths <= plan.seq_length_tokens).all()
    flat = segments.rows * plan.seq_length_tokens + segments.columns
    assert (np.diff(flat) >= lengths[:-1]).all()
    same_row = np.diff(segments.rows) == 0
    assert (np.diff(flat)[same_row] == lengths[:-1][same_row]).all()


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_a_permutation_hits_every_index_once_and_answers_for_single_ones_of_millions(
    size, seed, epoch
):
    assert sorted(
        batch_plan.permute(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()
    ) == list(range(size))
    some = batch_plan.permute(
        np.array([0, 1, 201_999_999], dtype=np.uint64), 202_000_000, seed, epoch
    )
    assert len(set(some.tolist())) == 3
    assert some.max() < 202_000_000


def test_epochs_and_seeds_have_orders_of_their_own_in_which_neighbours_end_up_far_apart():
    indices = np.arange(10_000, dtype=np.uint64)
    numbers = itertools.product(range(3), repeat=2)
    orders = [
        batch_plan.permute(indices, 10_000, *one).astype(np.int64) for one in numbers
    ]
    assert len({order.tobytes() for order in orders}) == 9
    # Of a random permutation the mean distance is a third of the size.
    assert abs(np.abs(np.diff(orders[0])).mean() - 10_000 / 3) < 200


def test_where_each_index_lands_is_uniform():
    # Where index 0 of 16 lands over many seeds: chi-square with 15 degrees of freedom,
    # wrong once in a million.
    landed = [
        int(batch_plan.permute(np.zeros(1, dtype=np.uint64), 16, seed, 0)[0])
        for seed in range(3200)
    ]
    assert ((np.bincount(landed, minlength=16) - 200) ** 2 / 200).sum() < 60


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_a_hash_tells_the_order_of_its_words(a, b):
    assert (batch_plan.hash_words(a, b)[0] == batch_plan.hash_words(b, a)[0]) == (
        a == b
    )


PROBLEMS = st.integers(1, 100).flatmap(
    lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row), max_size=200))
)


def _slow_best_fit(lengths: list[int], seq_length_tokens: int) -> list[int]:
    """The same by looking at every open row; of equally full ones the one filled
    last."""
    free: dict[int, int] = {}  # in the order in which they were filled last
    rows = [0] * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        roomy = [row for row in reversed(free) if free[row] >= lengths[sample]]
        row = min(roomy, key=free.__getitem__, default=len(free))
        free[row] = free.pop(row, seq_length_tokens) - lengths[sample]
        rows[sample] = row
    return rows


@given(problem=PROBLEMS)
def test_the_rows_are_those_of_best_fit_by_trying_every_row_and_no_two_could_be_one(
    problem,
):
    seq_length_tokens, lengths = problem
    rows = batch_plan.pack_sequences(
        np.array(lengths, dtype=np.int64), seq_length_tokens
    )
    assert rows.tolist() == _slow_best_fit(lengths, seq_length_tokens)
    filled = np.sort(np.bincount(rows, weights=lengths))
    assert all(0 < tokens <= seq_length_tokens for tokens in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > seq_length_tokens


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_a_sample_that_no_row_can_hold_is_refused(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        batch_plan.pack_sequences(np.array(lengths), 8)


@pytest.mark.parametrize(
    ("samples", "lanes"),
    [(1, 1), (1023, 1), (1024, 2), (2500, 4), (10**6, batch_plan.LANES)],
)
def test_a_small_dataset_has_fewer_lanes_so_that_blocks_are_full(samples, lanes):
    assert make_plan(Lengths(np.ones(samples))).lanes == lanes


def test_a_rank_among_many_packs_one_lane_only():
    plan = make_plan(
        Lengths(np.ones(100_000)), world_size=256, global_batch_size=256 * 184
    )
    assert [len(plan.lanes_of(rank)) for rank in (0, 3, 255)] == [1, 1, 1]


def test_packed_rows_come_in_an_order_that_does_not_tell_their_fill():
    index = Lengths(np.random.default_rng(0).integers(1, 400, 1024))
    segments = batch_plan.lay_out(make_plan(index, seq_length_tokens=512), 0, 0, index)
    longest = np.zeros(int(segments.rows.max()) + 1)
    np.maximum.at(longest, segments.rows, segments.tokens)
    # Best fit alone gives a correlation near -1 between a row's number and its longest
    # sample.
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.15


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_rows_mean_is_that_of_what_is_trained_on_and_turns_tokens_or_samples_into_rows(
    layout, dataset
):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    (batch,) = micro_batches(dataset, config)
    rows = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    found = sequence_statistics(config, dataset)
    means = found.mean_non_padding_tokens, found.mean_samples
    assert means == pytest.approx(
        (batch.non_padding_tokens / rows, len(batch.starts_N) / rows)
    )
    for name, mean in zip(
        ("global_batch_tokens", "global_batch_samples"), means, strict=True
    ):
        assert (
            with_batch_in_sequences(
                config.model_copy(update={name: round(20 * mean)}), dataset
            ).global_batch_size
            == 20
        )
    assert with_batch_in_sequences(config, dataset) is config
