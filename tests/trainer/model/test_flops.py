import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.model.flops import attended_pairs


@given(length=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(0, 40)))
def test_counts_pairs_within_reach(length, reach):
    pairs = itertools.product(range(length), repeat=2)
    assert attended_pairs(np.array([length]), reach) == sum(
        reach is None or abs(query - key) <= reach for query, key in pairs
    )


def test_flops_match_count_of_torch(dataset):
    """In sequences that one document fills, torch counts the matmuls that we count.

    Attention is compared on its own: torch's backward of attention multiplies 5 times
    instead of 4, as it computes the scores again.
    """
    config = config_of(layout="padded", seq_length_tokens=16)
    training = training_of(config, dataset)
    tokens = 8 * 16
    batch = next(
        batch
        for batch in micro_batches(dataset, config, steps=30)
        if batch.non_padding_tokens == tokens
    )
    with FlopCounterMode(display=False) as counter:
        training.module(batch).backward()
    matmuls = sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if "mm" in str(name)
    )
    work = training.work
    expected_matmuls = 6 * (
        work.weights_per_token * tokens
        + work.weights_per_predicted_token * batch.predicted_tokens
    )
    assert expected_matmuls == matmuls

    lengths = batch.tokens_N.numpy().astype(np.int64)
    attention = work.step_flops(lengths, batch.predicted_tokens) - expected_matmuls
    # Two layers of width 32, the last one for tokens to predict only.
    pairs = (1 + batch.predicted_tokens / tokens) * tokens * 16
    assert attention == pytest.approx(6 * 2 * 32 * pairs)


def test_sliding_windows_cost_less(dataset):
    work = training_of(config_of("modernbert"), dataset).work
    assert work.reaches == (None, 4, 4, None)
    everywhere = dataclasses.replace(work, reaches=(None,) * 4)
    assert work.step_flops(np.array([60]), 9) < everywhere.step_flops(np.array([60]), 9)
