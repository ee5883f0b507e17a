import multiprocessing
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import write_dataset
from trainer.batch import make_plan
from trainer.config import DataSettings, ModelSettings, TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.feed import MicroBatch, MicroBatchSource, make_loader, micro_batch_plans
from trainer.masking import IGNORED_LABEL

LAYOUTS = ("padded", "bucketed", "packed")


def _config(**changes) -> TrainConfig:
    settings = {
        "model": ModelSettings(name="m", config={"model_type": "bert"}),
        "seq_length_tokens": 16,
        "micro_batch_rows": 4,
        "global_batch_rows": 4,
    }
    return TrainConfig(**settings | changes)


def batches(dataset: TokenDataset, config: TrainConfig, count: int, world: int = 1, rank: int = 0, start=None):
    plan = make_plan(config, len(dataset), world)
    plans = micro_batch_plans(dataset, config, plan, rank, position=start)
    return list(islice(make_loader(MicroBatchSource(dataset, config, plan), config, islice(plans, count)), count))


def content(batch: MicroBatch) -> tuple[bytes, ...]:
    tensors = (batch.ids_BS, batch.starts_N, batch.tokens_N, batch.predicted_P, batch.targets_P)
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


def restored(batch: MicroBatch) -> np.ndarray:
    """The ids before they were corrupted, flattened."""
    ids = batch.wide_ids_BS().flatten()
    ids[batch.predicted_P.long()] = batch.targets_P.long()
    return ids.numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_framed_in_their_places_and_the_rest_is_padding(patterned_dataset, layout):
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seq_length_tokens=32)
    plan = make_plan(config, len(dataset), 1)
    source = MicroBatchSource(dataset, config, plan)
    for micro_plan in islice(micro_batch_plans(dataset, config, plan, 0), 30):
        batch = source.__getitems__(micro_plan)
        ids = restored(batch)
        expected = np.zeros(len(ids), dtype=np.int64)
        for sample, start in zip(micro_plan.segments.samples.tolist(), batch.starts_N.tolist(), strict=True):
            body = dataset.read(sample, 30)
            expected[start : start + len(body) + 2] = [2, *body, 3]
        assert ids.tolist() == expected.tolist()
        assert batch.real_tokens == (expected != 0).sum()
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


def test_ids_travel_as_they_are_stored(patterned_dataset):
    (batch,) = batches(TokenDataset.open(patterned_dataset), _config(), 1)
    assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16
    assert batch.starts_N.dtype == batch.tokens_N.dtype == batch.predicted_P.dtype == torch.int32
    assert batch.wide_ids_BS().dtype == torch.int64


def test_rows_are_framed_padded_and_cut(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5, [60] * 100]))
    (batch,) = batches(dataset, _config(global_batch_rows=2), 1)
    assert sorted(batch.attention_BS().sum(dim=1).tolist()) == [7, 16]
    assert batch.real_tokens == 23
    assert (batch.ids_BS[:, 0].long() == 2).all()
    assert (batch.wide_ids_BS()[batch.attention_BS() == 0] == 0).all()


def test_labels_are_the_targets_in_their_places(patterned_dataset):
    (batch,) = batches(TokenDataset.open(patterned_dataset), _config(masking_probability=0.5), 1)
    labels = batch.labels_BS()
    assert int((labels != IGNORED_LABEL).sum()) == batch.predicted_tokens > 0
    assert labels.flatten()[batch.predicted_P.long()].tolist() == batch.targets_P.long().tolist()


def test_bucketed_rows_are_as_wide_as_the_longest_needs(make_dataset):
    samples = [[50] * length for length in (3, 4, 5, 200, 201, 202)]
    config = _config(layout="bucketed", seq_length_tokens=512, micro_batch_rows=3, global_batch_rows=6)
    short, long = batches(TokenDataset.open(make_dataset(samples)), config, 2)
    assert short.ids_BS.shape == (3, 64)
    assert long.ids_BS.shape == (3, 256)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_change_nothing_about_the_batches(patterned_dataset, layout, workers):
    dataset = TokenDataset.open(patterned_dataset)
    alone = batches(dataset, _config(layout=layout), 12)
    config = _config(layout=layout, data=DataSettings(loader_workers=workers, prefetch_batches=3))
    shared = batches(dataset, config, 12)
    assert [content(batch) for batch in alone] == [content(batch) for batch in shared]
    assert [batch.after for batch in alone] == [batch.after for batch in shared]


def test_loader_processes_are_forked_whatever_pythons_default_is(patterned_dataset):
    class Unsendable(MicroBatchSource):
        """A class that no other process could import."""

    dataset, config = TokenDataset.open(patterned_dataset), _config(data=DataSettings(loader_workers=1))
    plan = make_plan(config, len(dataset), 1)
    plans = islice(micro_batch_plans(dataset, config, plan, 0), 2)
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default since Python 3.14
    try:
        loader = make_loader(Unsendable(dataset, config, plan), config, plans)
        assert len(list(islice(loader, 2))) == 2
    finally:
        multiprocessing.set_start_method(before, force=True)


@settings(deadline=None, max_examples=25)
@given(
    layout=st.sampled_from(LAYOUTS),
    before=st.integers(0, 6),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_starting_anywhere_continues_bit_for_bit(patterned_dataset, layout, before, accumulation, seed):
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seed=seed, global_batch_rows=4 * accumulation)
    whole = batches(dataset, config, (before + 3) * accumulation)
    position = whole[before * accumulation - 1].after if before else None
    rest = batches(dataset, config, 3 * accumulation, start=position)
    assert [content(batch) for batch in whole[before * accumulation :]] == [content(batch) for batch in rest]


def test_the_corrupted_samples_do_not_depend_on_the_number_of_ranks(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)

    def rows(world: int) -> list[bytes]:
        config = _config(layout="packed", global_batch_rows=12)
        found = []
        for rank in range(world):
            for batch in batches(dataset, config, 3 * make_plan(config, 400, world).accumulation_steps, world, rank):
                found += [row.tobytes() for row in batch.ids_BS.numpy() if row.any()]
        return sorted(found)

    assert rows(1) == rows(2) == rows(3)


def test_rows_that_a_rank_lacks_are_empty_and_weigh_nothing(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5] * 10))
    (batch,) = batches(dataset, _config(global_batch_rows=3), 1, world=2, rank=1)
    assert batch.ids_BS.shape[0] == 2
    assert batch.real_tokens == 7
    assert (batch.labels_BS()[1] == IGNORED_LABEL).all()
    assert batch.attention_BS()[1].sum() == 1


def test_a_batch_of_nothing_but_empty_rows_can_be_made(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5]))
    first, second = batches(dataset, _config(global_batch_rows=1, max_epochs=1), 2)
    assert (first.real_tokens, second.real_tokens, second.predicted_tokens) == (7, 0, 0)


def test_validation_samples_are_read_as_their_own_split(tmp_path):
    directory = write_dataset(tmp_path / "data", [[50] * 5] * 4, validation=[[60] * 3])
    dataset = TokenDataset.open(directory, "validation")
    (batch,) = batches(dataset, _config(global_batch_rows=1), 1)
    assert restored(batch)[:5].tolist() == [2, 60, 60, 60, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_beyond_the_vocabulary_are_refused_and_name_the_check(make_dataset, workers):
    directory = make_dataset([[50] * 5] * 8, vocab_size=128)
    (tokens,) = directory.glob("train-tokens-*")
    content = bytearray(tokens.read_bytes())
    content[-2:] = (60_000).to_bytes(2, "little")
    tokens.write_bytes(content)
    with pytest.raises(BadConfig) as caught:
        batches(TokenDataset.open(directory), _config(data=DataSettings(loader_workers=workers)), 2)
    assert "holds ids that its tokenizer does not have" in caught.value.message
    assert "autotune data verify" in caught.value.next_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounded_memory_whatever_was_visited(patterned_dataset, layout):
    # What a batch needs is freed with it: the most that is held at once does not grow with what was read.
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), 1)
    plans = micro_batch_plans(dataset, config, plan, 0)
    loader = make_loader(MicroBatchSource(dataset, config, plan), config, plans)
    tracemalloc.start()
    peaks = []
    for batches_read in (600, 2400):
        tracemalloc.reset_peak()
        for _ in range(batches_read):
            next(loader)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
