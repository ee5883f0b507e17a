"""Recipes of a comparison get the same global batch in non-padding tokens."""

import contextlib

import pytest

from autotune.subjects.mlm.baselines.global_batch import (
    global_batch_tokens,
    non_padding_share,
)
from testbed.datasets import write_dataset
from testbed.examples.feeds import CONFIG
from trainer.data.dataset import TokenDataset

SEQ_LENGTH_TOKENS = 16
TUNED = CONFIG.model_copy(
    update={
        "layout": "packed",
        "seq_length_tokens": SEQ_LENGTH_TOKENS,
        "global_batch_size": 10,
    }
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Return a dataset of samples of 8 tokens, two of which fill a sequence."""
    # Two special tokens are added to each.
    samples = [[5] * 6] * 100
    directory = tmp_path_factory.mktemp("recipes") / "data"
    write_dataset(directory, samples, vocab_size=128)
    with contextlib.closing(TokenDataset.open(directory)) as opened:
        yield opened


def test_global_batch_of_sequences_is_known_in_tokens(dataset):
    assert global_batch_tokens(TUNED, dataset) == 10 * SEQ_LENGTH_TOKENS


def test_global_batch_in_tokens_is_kept(dataset):
    in_tokens = TUNED.model_copy(update={"global_batch_tokens": 77})
    assert global_batch_tokens(in_tokens, dataset) == 77


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        pytest.param("packed", 1.0, id="packed"),
        pytest.param("padded", 0.5, id="padded"),
    ],
)
def test_share_of_full_sequences_is_known(dataset, layout, share):
    config = TUNED.model_copy(update={"layout": layout})
    assert non_padding_share(config, dataset) == pytest.approx(share)


@pytest.mark.parametrize("layout", ["dynamic", "bucketed"])
def test_share_of_trimmed_sequences_is_unknown(dataset, layout):
    config = TUNED.model_copy(update={"layout": layout})
    assert non_padding_share(config, dataset) is None
