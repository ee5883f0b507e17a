import itertools
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, micro_batches
from trainer.data import batch_plan
from trainer.data.batch_plan import (
    LANES,
    MIN_BLOCK_SAMPLES,
    SPECIAL_TOKENS_PER_SAMPLE,
    BatchPlan,
    Segments,
    pack_sequences,
    permute,
)
from trainer.data.global_batch import sequence_statistics, with_batch_in_sequences
from trainer.data.sampler import UNKNOWN, Position, SequenceSampler, join_positions

LAYOUTS = st.sampled_from(["padded", "dynamic", "bucketed", "packed"])


class FakeDataset:
    """A dataset of samples of given lengths, all in one shard."""

    def __init__(self, lengths: list[int] | np.ndarray) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def prefetch_offsets(self, samples: Callable[[], np.ndarray]) -> None:
        """Nothing needs to be prefetched."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.zeros_like(samples), self._begins[samples], self._lengths[samples]


def make_plan(dataset: FakeDataset, **options) -> BatchPlan:
    defaults = {
        "seed": 0,
        "seq_length_tokens": 64,
        "layout": "packed",
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "world_size": 1,
    }
    return BatchPlan(dataset_samples=len(dataset), **defaults | options)


def all_ranks(
    dataset: FakeDataset,
    plan: BatchPlan,
    steps: int,
    position: Position | None = None,
) -> tuple[list[list[Segments]], Position]:
    """Return the segments of every step, and the position of the job afterwards.

    A step has one ``Segments`` per micro-batch of every rank, rank by rank.
    """
    accumulation_steps = plan.gradient_accumulation_steps
    segments_by_step: list[list[Segments]] = [[] for _ in range(steps)]
    positions = []
    for rank in range(plan.world_size):
        sampler = SequenceSampler(plan, dataset, rank, position)
        last_position = position or Position.start(plan)
        plans = islice(sampler, steps * accumulation_steps)
        for number, micro_batch in enumerate(plans):
            segments_by_step[number // accumulation_steps].append(micro_batch.segments)
            last_position = micro_batch.after
        positions.append(last_position)
    return segments_by_step, join_positions(positions)


def content_of(step: list[Segments]) -> list[list[tuple[int, int, int, int]]]:
    """Return the content of every sequence of a step, whatever its number.

    It is a list of (epoch, sample, position, tokens).
    """
    contents = []
    for segments in step:
        for sequence in np.unique(segments.sequences):
            inside = segments[segments.sequences == sequence]
            fields = (inside.epochs, inside.samples, inside.positions, inside.tokens)
            columns = [field.tolist() for field in fields]
            contents.append(list(zip(*columns, strict=True)))
    return sorted(contents)


@st.composite
def jobs(draw):
    """A dataset and options of a plan; some datasets fill several lanes and blocks."""
    samples = draw(st.one_of(st.integers(1, 80), st.integers(2000, 6000)))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 90, samples)
    max_batch_size = max(1, samples // draw(st.integers(1, 6)))
    batch_sizes = st.integers(max(1, max_batch_size // 2), max_batch_size)
    return FakeDataset(lengths), {
        "seed": draw(st.integers(0, 9)),
        "layout": draw(LAYOUTS),
        "global_batch_size": draw(batch_sizes),
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "world_size": draw(st.integers(1, 9)),
    }


@settings(deadline=None, max_examples=60)
@given(job=jobs(), epochs=st.integers(1, 3))
def test_every_sample_comes_once_per_epoch(job, epochs):
    dataset, options = job
    plan = make_plan(dataset, max_epochs=epochs, **options)
    steps = -(-epochs * len(dataset) * 2 // plan.global_batch_size) + 1
    segments_by_step, _ = all_ranks(dataset, plan, steps)
    segments = Segments.join(list(itertools.chain(*segments_by_step)))
    for epoch in range(epochs):
        samples = segments.samples[segments.epochs == epoch]
        assert sorted(samples.tolist()) == list(range(len(dataset)))
    assert len(segments) == epochs * len(dataset)
    # After the last epoch all sequences are empty.
    assert not any(len(micro_batch) for micro_batch in segments_by_step[-1])


@settings(deadline=None, max_examples=60)
@given(
    job=jobs(),
    steps_before=st.integers(0, 4),
    world_size=st.integers(1, 9),
    accumulation_steps=st.integers(1, 4),
)
def test_order_does_not_depend_on_ranks(
    job, steps_before, world_size, accumulation_steps
):
    dataset, options = job
    plan = make_plan(dataset, **options)
    uninterrupted, end = all_ranks(dataset, plan, steps_before + 2)
    _, position = all_ranks(dataset, plan, steps_before)
    other_split = {
        "world_size": world_size,
        "gradient_accumulation_steps": accumulation_steps,
    }
    other_plan = make_plan(dataset, **options | other_split)
    resumed, resumed_end = all_ranks(dataset, other_plan, 2, position)
    assert [content_of(step) for step in uninterrupted[steps_before:]] == [
        content_of(step) for step in resumed
    ]
    assert end == resumed_end


@settings(deadline=None, max_examples=60)
@given(job=jobs())
def test_samples_fill_sequences_without_overlap(job):
    dataset, options = job
    plan = make_plan(dataset, **options)
    segments_by_step, _ = all_ranks(dataset, plan, 2)
    for segments in itertools.chain(*segments_by_step):
        check_positions(plan, segments)
        _, _, stored_tokens = dataset.locate(segments.samples)
        assert (segments.tokens == np.minimum(stored_tokens, 62)).all()
        if options["layout"] != "packed":
            assert not segments.positions.any()


def check_positions(plan: BatchPlan, segments: Segments) -> None:
    """Check that samples lie within their sequences, in order, without a gap."""
    lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
    assert (segments.sequences >= 0).all()
    assert (segments.sequences < plan.sequences_per_micro_batch).all()
    assert (segments.positions + lengths <= plan.seq_length_tokens).all()
    begins = segments.sequences * plan.seq_length_tokens + segments.positions
    distances = np.diff(begins)
    assert (distances >= lengths[:-1]).all()
    is_same_sequence = np.diff(segments.sequences) == 0
    assert (distances[is_same_sequence] == lengths[:-1][is_same_sequence]).all()


@settings(deadline=None, max_examples=60)
@given(job=jobs())
def test_ranks_share_a_step_evenly(job):
    dataset, options = job
    plan = make_plan(dataset, **options)
    segments_by_step, _ = all_ranks(dataset, plan, 2)
    for step in segments_by_step:
        samples = []
        for segments in step:
            numbers = segments.epochs * len(dataset) + segments.samples
            samples += numbers.tolist()
        assert len(set(samples)) == len(samples)

        sequences = np.array([len(np.unique(part.sequences)) for part in step])
        by_rank = sequences.reshape(plan.world_size, -1).sum(axis=1)
        assert by_rank.sum() == plan.global_batch_size
        assert by_rank.max() - by_rank.min() <= 1


def test_bucketed_micro_batches_hold_like_lengths():
    dataset = FakeDataset(np.random.default_rng(0).integers(1, 60, 9000))
    options = {"global_batch_size": 256, "gradient_accumulation_steps": 8}
    padded, _ = all_ranks(dataset, make_plan(dataset, layout="padded", **options), 3)
    bucketed, _ = all_ranks(
        dataset, make_plan(dataset, layout="bucketed", **options), 3
    )
    # The sequences of a step stay the same.
    assert [content_of(step) for step in padded] == [
        content_of(step) for step in bucketed
    ]

    def padding_share(steps):
        micro_batches = list(itertools.chain(*steps))
        tokens = sum(part.tokens.sum() for part in micro_batches)
        positions = sum(part.tokens.max() * len(part) for part in micro_batches)
        return 1 - tokens / positions

    assert padding_share(bucketed) < padding_share(padded) / 3


def test_packing_leaves_less_than_half_a_per_cent_empty():
    # Like the lengths of real documents.
    lengths = np.exp(np.random.default_rng(0).normal(5.05, 1.3, 40_000))
    dataset = FakeDataset(np.minimum(lengths, 5000).astype(np.int64))
    plan = make_plan(
        dataset, seq_length_tokens=512, global_batch_size=64, max_epochs=None
    )
    segments_by_step, _ = all_ranks(dataset, plan, 200)
    segments = Segments.join(list(itertools.chain(*segments_by_step)))
    non_padding_tokens = int((segments.tokens + SPECIAL_TOKENS_PER_SAMPLE).sum())
    assert non_padding_tokens / (200 * plan.padded_tokens) > 0.995


def test_position_counts_blocks_of_each_lane():
    dataset = FakeDataset(np.full(3 * MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(dataset, global_batch_size=MIN_BLOCK_SAMPLES + 1)
    assert plan.lanes == 3
    _, position = all_ranks(dataset, plan, 4)
    assert position.rows == 4 * (MIN_BLOCK_SAMPLES + 1)
    # Every sequence holds one sample here; 2,052 sequences, taken in turn from three
    # lanes, are 684 of each: an epoch's two blocks of 128 and 384, the next one's first
    # of 128, and 44 sequences of its second.
    blocks_and_sequences = [
        divmod(lane_position, MIN_BLOCK_SAMPLES) for lane_position in position.lanes
    ]
    assert blocks_and_sequences == [(3, 44)] * 3


@pytest.mark.parametrize(
    ("lengths", "sequences", "lanes", "message"),
    [
        pytest.param(
            np.ones(5000), 8, (2, 2, UNKNOWN, 2), "nothing of lane 2", id="lane missing"
        ),
        pytest.param(
            np.full(1000, 30), 400, (400,), "row 400", id="position of another plan"
        ),
    ],
)
def test_rejects_position_of_another_job(lengths, sequences, lanes, message):
    dataset = FakeDataset(lengths)
    position = Position(steps=1, rows=sequences, lanes=lanes)
    with pytest.raises(ValueError, match=message):
        next(iter(SequenceSampler(make_plan(dataset), dataset, 0, position)))


def test_positions_of_different_steps_do_not_join():
    positions = [
        Position(steps=1, rows=8, lanes=(1,)),
        Position(steps=2, rows=16, lanes=(2,)),
    ]
    with pytest.raises(ValueError, match="different steps"):
        join_positions(positions)


def test_positions_without_a_lane_do_not_join():
    with pytest.raises(ValueError, match="no rank follows lane 1"):
        join_positions([Position(steps=1, rows=8, lanes=(1, UNKNOWN))])


def test_resuming_locates_only_current_blocks():
    class CountingDataset(FakeDataset):
        located_samples = 0

        def locate(self, samples):
            self.located_samples += len(samples)
            return super().locate(samples)

    dataset = CountingDataset(np.full(64 * MIN_BLOCK_SAMPLES, 62))
    plan = make_plan(dataset, global_batch_size=64)
    position = Position(steps=500, rows=32_000, lanes=(4000,) * plan.lanes)
    next(iter(SequenceSampler(plan, dataset, 0, position)))
    # The current block of each lane, and the one that is packed ahead.
    assert dataset.located_samples <= 2 * plan.lanes * MIN_BLOCK_SAMPLES


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_permutation_hits_every_index_once(size, seed, epoch):
    images = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(images.tolist()) == list(range(size))


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_permutation_maps_single_indices_of_millions(seed, epoch):
    size = 202_000_000
    images = permute(np.array([0, 1, size - 1], dtype=np.uint64), size, seed, epoch)
    assert len(set(images.tolist())) == 3
    assert images.max() < size


def test_permutations_differ_between_epochs_and_seeds():
    indices = np.arange(10_000, dtype=np.uint64)
    orders = [
        permute(indices, 10_000, seed, epoch).astype(np.int64)
        for seed, epoch in itertools.product(range(3), repeat=2)
    ]
    assert len({order.tobytes() for order in orders}) == 9
    # Of a random permutation the mean distance is a third of the size.
    assert abs(np.abs(np.diff(orders[0])).mean() - 10_000 / 3) < 200


def test_image_of_an_index_is_uniform():
    # Image of index 0 of 16 over many seeds: chi-square with 15 degrees of freedom,
    # wrong once in a million.
    zero = np.zeros(1, dtype=np.uint64)
    images = [int(permute(zero, 16, seed, 0)[0]) for seed in range(3200)]
    counts = np.bincount(images, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 60


@given(first=st.integers(0, 2**64 - 1), second=st.integers(0, 2**64 - 1))
def test_hash_depends_on_the_order_of_words(first, second):
    hashes_match = (
        batch_plan.hash_words(first, second)[0]
        == batch_plan.hash_words(second, first)[0]
    )
    assert hashes_match == (first == second)


PACKING_PROBLEMS = st.integers(1, 100).flatmap(
    lambda capacity: st.tuples(
        st.just(capacity), st.lists(st.integers(1, capacity), max_size=200)
    )
)


def _slow_best_fit(lengths: list[int], seq_length_tokens: int) -> list[int]:
    """Pack as ``pack_sequences`` does, by trying every open sequence.

    Of equally full ones it takes the one filled last.
    """
    free_tokens: dict[int, int] = {}  # in the order in which they were filled last
    sequences = [0] * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[sample]
        with_room = [
            sequence
            for sequence in reversed(free_tokens)
            if free_tokens[sequence] >= length
        ]
        sequence = min(with_room, key=free_tokens.__getitem__, default=len(free_tokens))
        free_tokens[sequence] = free_tokens.pop(sequence, seq_length_tokens) - length
        sequences[sample] = sequence
    return sequences


@given(problem=PACKING_PROBLEMS)
def test_packing_is_best_fit_decreasing(problem):
    seq_length_tokens, lengths = problem
    sequences = pack_sequences(np.array(lengths, dtype=np.int64), seq_length_tokens)
    assert sequences.tolist() == _slow_best_fit(lengths, seq_length_tokens)


@given(problem=PACKING_PROBLEMS)
def test_no_two_packed_sequences_could_be_one(problem):
    seq_length_tokens, lengths = problem
    sequences = pack_sequences(np.array(lengths, dtype=np.int64), seq_length_tokens)
    filled_tokens = np.sort(np.bincount(sequences, weights=lengths))
    assert all(0 < tokens <= seq_length_tokens for tokens in filled_tokens)
    assert len(filled_tokens) < 2 or sum(filled_tokens[:2]) > seq_length_tokens


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_rejects_sample_that_no_sequence_holds(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        pack_sequences(np.array(lengths), 8)


@pytest.mark.parametrize(
    ("samples", "lanes"),
    [(1, 1), (1023, 1), (1024, 2), (2500, 4), (10**6, LANES)],
)
def test_small_dataset_has_fewer_lanes(samples, lanes):
    assert make_plan(FakeDataset(np.ones(samples))).lanes == lanes


def test_rank_among_many_packs_one_lane():
    plan = make_plan(
        FakeDataset(np.ones(100_000)), world_size=256, global_batch_size=256 * 184
    )
    assert [len(plan.lanes_of(rank)) for rank in (0, 3, 255)] == [1, 1, 1]


def test_order_of_packed_sequences_is_random():
    dataset = FakeDataset(np.random.default_rng(0).integers(1, 400, 1024))
    plan = make_plan(dataset, seq_length_tokens=512)
    segments = batch_plan.lay_out(plan, 0, 0, dataset)
    longest_samples = np.zeros(int(segments.sequences.max()) + 1)
    np.maximum.at(longest_samples, segments.sequences, segments.tokens)
    # Best fit alone gives a correlation near -1 between a sequence's number and its
    # longest sample.
    numbers = np.arange(len(longest_samples))
    assert abs(np.corrcoef(numbers, longest_samples)[0, 1]) < 0.15


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_sequence_statistics_match_training_batches(layout, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    (batch,) = micro_batches(dataset, config)
    sequences = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    statistics = sequence_statistics(config, dataset)
    assert statistics.mean_non_padding_tokens == pytest.approx(
        batch.non_padding_tokens / sequences
    )
    assert statistics.mean_samples == pytest.approx(len(batch.starts_N) / sequences)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("setting", "mean_name"),
    [
        ("global_batch_tokens", "mean_non_padding_tokens"),
        ("global_batch_samples", "mean_samples"),
    ],
)
def test_global_batch_is_converted_to_sequences(layout, setting, mean_name, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    mean = getattr(sequence_statistics(config, dataset), mean_name)
    with_setting = config.model_copy(update={setting: round(20 * mean)})
    converted = with_batch_in_sequences(with_setting, dataset)
    assert converted.global_batch_size == 20


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_global_batch_in_sequences_is_unchanged(layout, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    assert with_batch_in_sequences(config, dataset) is config
