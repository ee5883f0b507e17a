import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.dataset import TokenDataset
from trainer.peaks import ModelWork, attended_pairs


@given(length=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(0, 40)))
def test_pairs_are_those_within_reach(length, reach):
    counted = sum(
        1 for one, other in itertools.product(range(length), repeat=2) if reach is None or abs(one - other) <= reach
    )
    assert attended_pairs(np.array([length]), reach) == counted


def test_operations_agree_with_torchs_own_count(patterned_dataset):
    """Of rows that one document fills, torch counts the products we count; its backward of attention multiplies 5 times
    instead of 4, as it computes the scores anew, so attention is told apart."""
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(layout="padded", seq_length_tokens=16)
    training = training_of(config, dataset)
    batches = [batch for batch in micro_batches(dataset, config, steps=30) if batch.real_tokens == 8 * 16]
    (batch, *_) = batches
    with FlopCounterMode(display=False) as counter:
        training.module(batch).backward()
    by_operation = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in by_operation.items() if "mm" in str(name))
    work = training.work
    tokens = batch.real_tokens
    ours = 6 * (work.weights_per_token * tokens + work.weights_per_predicted_token * batch.predicted_tokens)
    assert ours == products
    lengths = batch.tokens_N.numpy().astype(np.int64)
    pairs = 8 * 16**2
    asked = (1 + batch.predicted_tokens / tokens) * pairs
    assert work.step_flops(lengths, batch.predicted_tokens) - ours == pytest.approx(6 * 2 * 32 * asked)


def test_the_other_convention_is_six_operations_for_each_parameter_and_token():
    work = ModelWork(
        parameters=10, weights_per_token=1, weights_per_predicted_token=1, attention_width=1, reaches=(None,)
    )
    assert work.six_n_flops(7.0) == 420


def test_sliding_windows_cost_less(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    work = training_of(config_of("modernbert"), dataset).work
    assert work.reaches == (None, 4, 4, None)
    everywhere = dataclasses.replace(work, reaches=(None,) * 4)
    assert work.step_flops(np.array([60]), 9) < everywhere.step_flops(np.array([60]), 9)
