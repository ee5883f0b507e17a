"""FLOPs of a training step, compared with those that torch counts."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.data.micro_batch import MicroBatch
from trainer.formats.train_config import TrainConfig
from trainer.model.flops import ModelWork, attended_pairs

SEQUENCES = 8
WIDTH = 16
TOKENS = SEQUENCES * WIDTH
HIDDEN_SIZE = 32
"""Width of the layers of ``config_of``."""


@given(length=st.integers(1, 60), reach=st.one_of(st.none(), st.integers(0, 40)))
def test_counts_pairs_within_reach(length, reach):
    pairs = itertools.product(range(length), repeat=2)
    assert attended_pairs(np.array([length]), reach) == sum(
        reach is None or abs(query - key) <= reach for query, key in pairs
    )


@pytest.fixture
def training(dataset) -> Training:
    return training_of(_filled_config(), dataset)


@pytest.fixture
def batch(dataset) -> MicroBatch:
    """A micro-batch in which one document fills each sequence."""
    batches = micro_batches(dataset, _filled_config(), steps=30)
    return next(batch for batch in batches if batch.non_padding_tokens == TOKENS)


def _filled_config() -> TrainConfig:
    return config_of(
        layout="padded", seq_length_tokens=WIDTH, micro_batch_size=SEQUENCES
    )


def _matmul_flops(work: ModelWork, batch: MicroBatch) -> int:
    """Return the FLOPs of a step without attention: forward, and twice backward."""
    return 6 * (
        work.weights_per_token * TOKENS
        + work.weights_per_predicted_token * batch.predicted_tokens
    )


def test_matmuls_match_count_of_torch(training, batch):
    with FlopCounterMode(display=False) as counter:
        training.module(batch).backward()
    # Without attention: torch's backward of attention has 5 matmuls instead of 4, as it
    # computes the scores again.
    counted = sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if "mm" in str(name)
    )
    assert _matmul_flops(training.work, batch) == counted


def test_attention_counts_pairs_of_each_layer(training, batch):
    lengths = batch.tokens_N.numpy().astype(np.int64)
    flops = training.work.step_flops(lengths, batch.predicted_tokens)
    # Queries of both layers; those of the last one are only tokens to predict.
    queries = TOKENS + batch.predicted_tokens
    pairs = queries * WIDTH
    # Scores and values are a matmul each: in forward, and twice in backward.
    flops_per_pair = 6 * 2 * HIDDEN_SIZE
    attention_flops = flops - _matmul_flops(training.work, batch)
    assert attention_flops == pytest.approx(flops_per_pair * pairs)


def test_sliding_windows_cost_less(dataset):
    work = training_of(config_of("modernbert"), dataset).work
    assert work.reaches == (None, 4, 4, None)
    everywhere = dataclasses.replace(work, reaches=(None,) * 4)
    assert work.step_flops(np.array([60]), 9) < everywhere.step_flops(np.array([60]), 9)
