"""The stream of micro-batches that a rank loads: their content, widths and workers."""

import gc
import multiprocessing
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import torch

from tests.trainer.tiny_models import config_of
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import DataSettings, TrainConfig

PAD_ID = 0
CLS_ID = 2
SEP_ID = 3
SPECIAL_TOKENS = 2
"""Tokens that frame every sample: [CLS] and [SEP]."""
ORDINARY_ID = 50
BATCHES = 30
"""Micro-batches of a test that looks at several."""


def small_config(**changes) -> TrainConfig:
    """Return a configuration of one small micro-batch per step."""
    settings = {
        "layout": "padded",
        "seq_length_tokens": 16,
        "micro_batch_size": 4,
        "global_batch_size": 4,
    }
    return config_of(**settings | changes)


def load(
    dataset: TokenDataset,
    config: TrainConfig,
    count: int,
    *,
    world_size: int = 1,
    rank: int = 0,
    source_class: type[MicroBatchSource] = MicroBatchSource,
) -> list[MicroBatch]:
    """Return the first ``count`` micro-batches of a rank."""
    plan = make_plan(config, len(dataset), world_size)
    plans = islice(micro_batch_plans(dataset, config, plan, rank), count)
    loader = make_loader(source_class(dataset, config, plan), config, plans)
    return list(islice(loader, count))


def test_samples_are_framed_by_special_tokens(dataset, layout):
    seq_length_tokens = 32
    config = small_config(layout=layout, seq_length_tokens=seq_length_tokens)
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    plans = list(islice(micro_batch_plans(dataset, config, plan, rank=0), BATCHES))
    assert len(plans) == BATCHES
    for micro_batch_plan in plans:
        batch = source.__getitems__(micro_batch_plan)
        ids = batch.wide_ids_BS().flatten().numpy()
        # Undo the masking.
        ids[batch.predicted_P] = batch.targets_P
        expected = np.full(len(ids), PAD_ID, dtype=np.int64)
        samples = micro_batch_plan.segments.samples.tolist()
        for sample, start in zip(samples, batch.starts_N.tolist(), strict=True):
            body = dataset.read(sample, seq_length_tokens - SPECIAL_TOKENS)
            framed = [CLS_ID, *body, SEP_ID]
            expected[start : start + len(framed)] = framed
        assert ids.tolist() == expected.tolist()
        assert batch.non_padding_tokens == (expected != PAD_ID).sum()


def test_ids_keep_their_stored_type(dataset):
    batches = load(dataset, small_config(), BATCHES)
    assert len(batches) == BATCHES
    for batch in batches:
        assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16


def test_predicted_tokens_are_counted(dataset):
    batches = load(dataset, small_config(), BATCHES)
    assert len(batches) == BATCHES
    for batch in batches:
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


@pytest.fixture
def varied_dataset(make_dataset):
    """A dataset of three short and three long samples."""
    lengths = (3, 4, 5, 200, 201, 202)
    samples = [[ORDINARY_ID] * length for length in lengths]
    return TokenDataset.open(make_dataset(samples))


def test_dynamic_width_is_the_longest_sample(varied_dataset):
    config = small_config(
        layout="dynamic", seq_length_tokens=150, micro_batch_size=2, global_batch_size=6
    )
    batches = load(varied_dataset, config, 3)
    assert len(batches) == 3
    for batch in batches:
        # Special tokens count, and long samples are cut.
        longest = int(batch.tokens_N.max())
        assert longest <= 150
        assert batch.ids_BS.shape == (2, longest)


def test_bucketed_width_is_rounded_up(varied_dataset):
    config = small_config(
        layout="bucketed",
        seq_length_tokens=512,
        micro_batch_size=3,
        global_batch_size=6,
    )
    shapes = [batch.ids_BS.shape for batch in load(varied_dataset, config, 2)]
    # Up to 7 and 204 tokens, rounded up to multiples of 64.
    assert shapes == [(3, 64), (3, 256)]


def test_workers_are_forked_whatever_pythons_default(dataset):
    class NotImportable(MicroBatchSource):
        """A class that no other process could import."""

    start_method = multiprocessing.get_start_method()
    # The default since Python 3.14.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        config = small_config(data=DataSettings(num_workers=1))
        batches = load(dataset, config, 2, source_class=NotImportable)
        assert len(batches) == 2
    finally:
        multiprocessing.set_start_method(start_method, force=True)


SAMPLE_TOKENS = 5 + SPECIAL_TOKENS
"""Length of the only sample of ``tiny_dataset`` in a sequence."""


@pytest.fixture
def tiny_dataset(make_dataset):
    """A dataset of one sample, which every epoch repeats."""
    return TokenDataset.open(make_dataset([[ORDINARY_ID] * 5]))


@pytest.fixture
def half_empty_batch(tiny_dataset):
    """A micro-batch of two sequences, of which the second is empty.

    The global batch of three sequences gives one to the second of two ranks.
    """
    config = small_config(global_batch_size=3)
    (batch,) = load(tiny_dataset, config, 1, world_size=2, rank=1)
    assert batch.ids_BS.shape[0] == 2
    return batch


def test_empty_sequence_adds_no_tokens(half_empty_batch):
    assert half_empty_batch.non_padding_tokens == SAMPLE_TOKENS


def test_empty_sequence_has_no_labels(half_empty_batch):
    assert (half_empty_batch.labels_BS()[1] == IGNORED_LABEL).all()


def test_empty_sequence_attends_to_one_padding_token(half_empty_batch):
    # A softmax over no token would be NaN.
    lengths = half_empty_batch.attention_BS().sum(dim=1).tolist()
    assert lengths == [SAMPLE_TOKENS, 1]


def test_micro_batch_after_the_last_epoch_is_empty(tiny_dataset):
    config = small_config(global_batch_size=1, max_epochs=1)
    first, second = load(tiny_dataset, config, 2)
    assert first.non_padding_tokens == SAMPLE_TOKENS
    assert second.non_padding_tokens == 0
    assert second.predicted_tokens == 0


@pytest.fixture
def free_loaders():
    """Free loaders that the traceback of an error has kept, so that their workers exit.

    At the end of all tests it would be too late: workers ignore the signal that
    multiprocessing sends then, and it would wait for them without end.
    """
    yield
    gc.collect()


@pytest.mark.usefixtures("free_loaders")
@pytest.mark.parametrize("workers", [0, 1])
def test_rejects_ids_beyond_the_vocabulary(make_dataset, workers):
    directory = make_dataset([[ORDINARY_ID] * 5] * 8, vocab_size=128)
    (tokens_file,) = directory.glob("train-tokens-*")
    tokens = np.load(tokens_file)
    tokens[-1] = 60_000
    np.save(tokens_file, tokens)
    config = small_config(data=DataSettings(num_workers=workers))
    with pytest.raises(BadConfig) as raised:
        load(TokenDataset.open(directory), config, 2)
    assert "contains ids that exceed its vocabulary" in raised.value.message
    assert "autotune data verify" in raised.value.next_step


def test_memory_does_not_grow_with_batches_read(dataset, layout):
    config = small_config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), world_size=1)
    loader = make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, rank=0),
    )

    def peak_bytes_over(batches):
        tracemalloc.reset_peak()
        for _ in range(batches):
            next(loader)
        _, peak_bytes = tracemalloc.get_traced_memory()
        return peak_bytes

    tracemalloc.start()
    first_peak_bytes = peak_bytes_over(600)
    # If every batch left something in memory, four times as many would leave four times
    # as much, in addition to the first ones.
    later_peak_bytes = peak_bytes_over(2400)
    tracemalloc.stop()
    assert later_peak_bytes < 1.5 * first_peak_bytes
