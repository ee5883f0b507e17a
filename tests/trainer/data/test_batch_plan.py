"""Lanes of a batch plan, and the order of its sequences."""

import numpy as np
import pytest

from tests.trainer.data.fake_dataset import FakeDataset, plan_of
from trainer.data.batch_plan import LANES, lay_out


@pytest.mark.parametrize(
    ("samples", "lanes"),
    [
        pytest.param(1, 1, id="one sample"),
        pytest.param(1023, 1, id="not two whole blocks"),
        pytest.param(1024, 2, id="two blocks"),
        pytest.param(2500, 4, id="four blocks and some samples"),
        pytest.param(10**6, LANES, id="more blocks than lanes"),
    ],
)
def test_every_lane_holds_a_block(samples, lanes):
    dataset = FakeDataset(np.ones(samples))
    assert plan_of(dataset).lanes == lanes


@pytest.mark.parametrize("rank", [0, 3, 255])
def test_rank_among_many_packs_one_lane(rank):
    plan = plan_of(
        FakeDataset(np.ones(100_000)), world_size=256, global_batch_size=256 * 184
    )
    assert len(plan.lanes_of(rank)) == 1


def test_order_of_packed_sequences_is_random():
    dataset = FakeDataset(np.random.default_rng(0).integers(1, 400, 1024))
    plan = plan_of(dataset, seq_length_tokens=512)
    segments = lay_out(plan, 0, 0, dataset)
    longest_samples = np.zeros(int(segments.sequences.max()) + 1)
    np.maximum.at(longest_samples, segments.sequences, segments.tokens)
    numbers = np.arange(len(longest_samples))
    correlation = np.corrcoef(numbers, longest_samples)[0, 1]
    # Best fit alone gives a correlation near -1 between a sequence's number and its
    # longest sample. A random order of these 56 sequences gives one near 0, with a
    # standard deviation of 0.13.
    assert abs(correlation) < 0.15
