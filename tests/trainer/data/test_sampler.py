"""Sequences of all ranks, step by step, from any position of a training."""

import itertools
import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.trainer.data.fake_dataset import (
    SEQ_LENGTH_TOKENS,
    FakeDataset,
    plan_of,
)
from trainer.data.batch_plan import (
    MIN_BLOCK_SAMPLES,
    SPECIAL_TOKENS_PER_SAMPLE,
    BatchPlan,
)
from trainer.data.position import UNKNOWN, Position, join_positions
from trainer.data.sampler import SequenceSampler
from trainer.data.segments import Segments

LAYOUTS = st.sampled_from(["padded", "dynamic", "bucketed", "packed"])
MAX_SAMPLE_TOKENS = SEQ_LENGTH_TOKENS - SPECIAL_TOKENS_PER_SAMPLE
"""Largest sample that a sequence of ``plan_of`` holds uncut, and then alone."""
many_jobs = settings(deadline=None, max_examples=60)


def steps_of_all_ranks(
    dataset: FakeDataset,
    plan: BatchPlan,
    steps: int,
    position: Position | None = None,
) -> tuple[list[list[Segments]], Position]:
    """Return the segments of the next steps, and the position of the job after them.

    A step is a list of ``Segments``, one per micro-batch of every rank, rank by rank.
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
    """Return the content of every sequence of a step, sorted.

    The content is a list of (epoch, sample, position, tokens), one per sample. It does
    not say which rank or micro-batch has the sequence.
    """
    contents = []
    for segments in step:
        for sequence in np.unique(segments.sequences):
            members = segments[segments.sequences == sequence]
            content = zip(
                members.epochs.tolist(),
                members.samples.tolist(),
                members.positions.tolist(),
                members.tokens.tolist(),
                strict=True,
            )
            contents.append(list(content))
    return sorted(contents)


@dataclass(frozen=True)
class Job:
    """A dataset and options of its plan."""

    dataset: FakeDataset
    options: dict[str, Any]


@st.composite
def jobs(draw) -> Job:
    """Draw a job.

    Small datasets are one lane of one block, and large ones several of both. Some
    samples are empty, and some are longer than a sequence. An epoch is one to a dozen
    steps.
    """
    small_samples = st.integers(1, 80)
    large_samples = st.integers(2000, 6000)
    samples = draw(st.one_of(small_samples, large_samples))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = rng.integers(0, 90, samples)
    max_batch_size = max(1, samples // draw(st.integers(1, 6)))
    batch_sizes = st.integers(max(1, max_batch_size // 2), max_batch_size)
    options = {
        "seed": draw(st.integers(0, 9)),
        "layout": draw(LAYOUTS),
        "global_batch_size": draw(batch_sizes),
        "gradient_accumulation_steps": draw(st.integers(1, 3)),
        "world_size": draw(st.integers(1, 9)),
    }
    return Job(FakeDataset(lengths), options)


def steps_of_epochs(job: Job, epochs: int) -> list[list[Segments]]:
    """Return the segments of every step until the data has surely ended."""
    plan = plan_of(job.dataset, max_epochs=epochs, **job.options)
    # An epoch has no more sequences than samples. Twice as many are enough, although
    # lanes end one by one.
    max_sequences = 2 * epochs * len(job.dataset)
    steps = math.ceil(max_sequences / plan.global_batch_size) + 1
    segments_by_step, _ = steps_of_all_ranks(job.dataset, plan, steps)
    return segments_by_step


@many_jobs
@given(job=jobs(), epochs=st.integers(1, 3))
def test_every_sample_comes_once_per_epoch(job, epochs):
    segments_by_step = steps_of_epochs(job, epochs)
    segments = Segments.join(list(itertools.chain(*segments_by_step)))
    for epoch in range(epochs):
        samples = segments.samples[segments.epochs == epoch]
        assert sorted(samples.tolist()) == list(range(len(job.dataset)))
    assert len(segments) == epochs * len(job.dataset)


@many_jobs
@given(job=jobs(), epochs=st.integers(1, 3))
def test_sequences_after_the_last_epoch_are_empty(job, epochs):
    last_step = steps_of_epochs(job, epochs)[-1]
    assert not any(len(micro_batch) for micro_batch in last_step)


@many_jobs
@given(
    job=jobs(),
    steps_before=st.integers(0, 4),
    world_size=st.integers(1, 9),
    accumulation_steps=st.integers(1, 4),
)
def test_order_does_not_depend_on_ranks(
    job, steps_before, world_size, accumulation_steps
):
    dataset = job.dataset
    plan = plan_of(dataset, **job.options)
    uninterrupted, end = steps_of_all_ranks(dataset, plan, steps_before + 2)
    _, position = steps_of_all_ranks(dataset, plan, steps_before)
    # Other ranks, and micro-batches of another size, take the last two steps.
    other_split = {
        "world_size": world_size,
        "gradient_accumulation_steps": accumulation_steps,
    }
    other_plan = plan_of(dataset, **job.options | other_split)
    resumed, resumed_end = steps_of_all_ranks(dataset, other_plan, 2, position)
    expected = [content_of(step) for step in uninterrupted[steps_before:]]
    assert [content_of(step) for step in resumed] == expected
    assert resumed_end == end


def first_steps(job: Job) -> list[list[Segments]]:
    """Return the segments of the first two steps of a job."""
    segments_by_step, _ = steps_of_all_ranks(
        job.dataset, plan_of(job.dataset, **job.options), 2
    )
    return segments_by_step


@many_jobs
@given(job=jobs())
def test_samples_lie_within_their_sequences(job):
    plan = plan_of(job.dataset, **job.options)
    for segments in itertools.chain(*first_steps(job)):
        lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
        assert (segments.sequences >= 0).all()
        assert (segments.sequences < plan.sequences_per_micro_batch).all()
        assert (segments.positions + lengths <= plan.seq_length_tokens).all()


@many_jobs
@given(job=jobs())
def test_samples_fill_sequences_without_gap_or_overlap(job):
    plan = plan_of(job.dataset, **job.options)
    for segments in itertools.chain(*first_steps(job)):
        lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
        begins = segments.sequences * plan.seq_length_tokens + segments.positions
        distances = np.diff(begins)
        assert (distances >= lengths[:-1]).all()
        is_same_sequence = np.diff(segments.sequences) == 0
        assert (distances[is_same_sequence] == lengths[:-1][is_same_sequence]).all()


@many_jobs
@given(job=jobs())
def test_long_samples_are_cut_to_a_sequence(job):
    for segments in itertools.chain(*first_steps(job)):
        _, _, stored_tokens = job.dataset.locate(segments.samples)
        expected_tokens = np.minimum(stored_tokens, MAX_SAMPLE_TOKENS)
        assert (segments.tokens == expected_tokens).all()


@many_jobs
@given(job=jobs())
def test_only_packed_sequences_hold_several_samples(job):
    assume(job.options["layout"] != "packed")
    for segments in itertools.chain(*first_steps(job)):
        assert not segments.positions.any()


@many_jobs
@given(job=jobs())
def test_no_step_has_a_sample_twice(job):
    for step in first_steps(job):
        samples = []
        for segments in step:
            # Unique for each sample and epoch.
            numbers = segments.epochs * len(job.dataset) + segments.samples
            samples += numbers.tolist()
        assert len(set(samples)) == len(samples)


@many_jobs
@given(job=jobs())
def test_ranks_share_a_step_evenly(job):
    plan = plan_of(job.dataset, **job.options)
    for step in first_steps(job):
        # One number for each micro-batch of every rank, rank by rank.
        sequences = np.array([len(np.unique(segments.sequences)) for segments in step])
        sequences_by_rank = sequences.reshape(plan.world_size, -1).sum(axis=1)
        assert sequences_by_rank.sum() == plan.global_batch_size
        assert sequences_by_rank.max() - sequences_by_rank.min() <= 1


def padding_share(steps: list[list[Segments]]) -> float:
    """Return the share of padding if each micro-batch is as wide as its longest sample.

    Every sequence must hold one sample.
    """
    tokens = 0
    positions = 0
    for segments in itertools.chain(*steps):
        tokens += segments.tokens.sum()
        positions += segments.tokens.max() * len(segments)
    return 1 - tokens / positions


def test_bucketed_micro_batches_hold_like_lengths():
    dataset = FakeDataset(np.random.default_rng(0).integers(1, 60, 9000))
    options = {"global_batch_size": 256, "gradient_accumulation_steps": 8}
    padded, _ = steps_of_all_ranks(
        dataset, plan_of(dataset, layout="padded", **options), 3
    )
    bucketed, _ = steps_of_all_ranks(
        dataset, plan_of(dataset, layout="bucketed", **options), 3
    )
    # Sequences change their micro-batch, but not their step.
    padded_contents = [content_of(step) for step in padded]
    assert [content_of(step) for step in bucketed] == padded_contents

    # Eight micro-batches of sorted lengths span an eighth of the range each, and their
    # padding is a fraction of that.
    assert padding_share(bucketed) < padding_share(padded) / 3


def test_packing_leaves_almost_no_padding():
    # Log-normal, like the lengths of real documents: half are shorter than 156 tokens,
    # and one in six is cut to the length of a sequence.
    lengths = np.random.default_rng(0).lognormal(5.05, 1.3, 40_000)
    dataset = FakeDataset(np.minimum(lengths, 5000).astype(np.int64))
    plan = plan_of(
        dataset, seq_length_tokens=512, global_batch_size=64, max_epochs=None
    )
    steps = 200
    segments_by_step, _ = steps_of_all_ranks(dataset, plan, steps)
    segments = Segments.join(list(itertools.chain(*segments_by_step)))
    non_padding_tokens = int((segments.tokens + SPECIAL_TOKENS_PER_SAMPLE).sum())
    assert non_padding_tokens / (steps * plan.padded_tokens) > 0.995


def test_position_counts_blocks_of_each_lane():
    # Every sequence holds one sample, so an epoch of a lane is two blocks: the first of
    # 128 sequences, and the second of the other 384.
    dataset = FakeDataset(np.full(3 * MIN_BLOCK_SAMPLES, MAX_SAMPLE_TOKENS))
    plan = plan_of(dataset, global_batch_size=513)
    assert plan.lanes == 3
    assert plan.first_block_samples == 128
    _, position = steps_of_all_ranks(dataset, plan, 4)
    assert position.rows == 4 * 513
    # Each of three lanes gave 684 sequences: 128 + 384 + 128 of three whole blocks, and
    # 44 of the fourth.
    blocks_and_sequences = [
        divmod(lane_position, MIN_BLOCK_SAMPLES) for lane_position in position.lanes
    ]
    assert blocks_and_sequences == [(3, 44)] * 3


@pytest.mark.parametrize(
    ("lengths", "sequences", "lanes", "message"),
    [
        pytest.param(
            np.ones(5000),
            8,
            (2, 2, UNKNOWN, 2),
            "nothing of lane 2",
            id="lane of the rank is missing",
        ),
        pytest.param(
            # Two samples fill a sequence: the first block, of 128, has 64 sequences.
            np.full(1000, 30),
            400,
            (400,),
            "row 400",
            id="sequence does not exist in the block",
        ),
    ],
)
def test_rejects_position_of_another_job(lengths, sequences, lanes, message):
    dataset = FakeDataset(lengths)
    position = Position(steps=1, rows=sequences, lanes=lanes)
    with pytest.raises(ValueError, match=message):
        next(iter(SequenceSampler(plan_of(dataset), dataset, 0, position)))


class CountingDataset(FakeDataset):
    """A dataset that counts the samples that it locates."""

    located_samples = 0

    def locate(self, samples):
        self.located_samples += len(samples)
        return super().locate(samples)


def test_resuming_locates_only_current_blocks():
    dataset = CountingDataset(np.full(64 * MIN_BLOCK_SAMPLES, MAX_SAMPLE_TOKENS))
    plan = plan_of(dataset, global_batch_size=64)
    # Every lane is in its eighth block, of which it has given 416 sequences, after 128
    # of the first block and 512 of each of six others: 3,616.
    assert plan.lanes == 8
    lane_position = 7 * MIN_BLOCK_SAMPLES + 416
    position = Position(steps=452, rows=452 * 64, lanes=(lane_position,) * 8)
    assert position.rows == 3616 * 8
    next(iter(SequenceSampler(plan, dataset, 0, position)))
    # The current block of each lane, and the one that is packed ahead.
    assert dataset.located_samples <= 2 * plan.lanes * MIN_BLOCK_SAMPLES
