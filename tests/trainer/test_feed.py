import torch

from trainer.config import DataSettings, ModelSettings, TrainConfig
from trainer.dataset import TokenDataset
from trainer.feed import MicroBatchSource, make_loader
from trainer.masking import IGNORED_LABEL
from trainer.plan import BatchPlan


def _config(**changes) -> TrainConfig:
    settings = {
        "model": ModelSettings(name="m", config={"model_type": "bert"}),
        "seq_length_tokens": 16,
        "micro_batch_rows": 4,
        "global_batch_rows": 4,
    }
    return TrainConfig(**settings | changes)


def _plan(dataset: TokenDataset, rows: int = 4, world: int = 1) -> BatchPlan:
    return BatchPlan(
        seed=0, dataset_samples=len(dataset), global_batch_rows=rows, accumulation_steps=1, world_size=world
    )


def test_rows_are_framed_padded_and_cut(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5, [60] * 100]))
    batch = MicroBatchSource(dataset, _config(), _plan(dataset, rows=2), 0)[0]
    lengths = sorted(batch.attention_BS.sum(dim=1).tolist())
    assert lengths == [7, 16]
    assert batch.real_tokens == 23
    assert (batch.ids_BS[:, 0] == 2).all()
    assert (batch.ids_BS[batch.attention_BS == 0] == 0).all()
    for row in range(2):
        assert batch.ids_BS[row, batch.attention_BS[row].sum() - 1] == 3


def test_loader_processes_change_nothing_about_the_batches(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    plan = _plan(dataset)
    alone = list(make_loader(MicroBatchSource(dataset, _config(), plan, 0), _config(), range(3, 12)))
    config = _config(data=DataSettings(loader_workers=2, prefetch_batches=3))
    shared = list(make_loader(MicroBatchSource(dataset, config, plan, 0), config, range(3, 12)))
    assert len(alone) == 9
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one.ids_BS, other.ids_BS)
        assert torch.equal(one.labels_BS, other.labels_BS)
        assert one.real_tokens == other.real_tokens


def test_rows_that_a_rank_lacks_are_empty_and_weigh_nothing(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5] * 10))
    plan = _plan(dataset, rows=3, world=2)
    batch = MicroBatchSource(dataset, _config(), plan, rank=1)[0]
    assert batch.ids_BS.shape[0] == 2
    assert batch.real_tokens == 7
    assert (batch.labels_BS[1] == IGNORED_LABEL).all()


def test_the_counted_predictions_are_those_of_the_labels(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    batch = MicroBatchSource(dataset, _config(), _plan(dataset), 0)[5]
    assert batch.predicted_tokens == int((batch.labels_BS != IGNORED_LABEL).sum())
