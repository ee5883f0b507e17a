import math

import pytest
import torch

from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.dataset import TokenDataset
from trainer.errors import TrainingFailed
from trainer.meter import DeviceFacts, Meter
from trainer.parallel import join_ranks
from trainer.step import StepResult
from trainer.stopwatch import Mark


@pytest.fixture
def rig(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_rows=4)
    training = training_of(config, dataset)
    meter = Meter(DeviceFacts(work=training.work, peak_flops_per_s=1e12), join_ranks(config, environment={}))
    return training, meter, iter(micro_batches(dataset, config, steps=8))


def _close(meter, step=1):
    meter.close(step, 0.1, head_overflows=3, recompilations=2)
    (row,) = meter.rows()
    return row


def test_a_row_holds_the_interval_since_the_last(rig):
    training, meter, batches = rig
    tokens = 0
    for _ in range(2):
        taken = meter.take(batches, 2)
        tokens += sum(batch.real_tokens for batch in taken)
        meter.add(taken, training.step.run(taken, 1e-3, part_of_it=True))
    row = _close(meter)
    assert row.real_tokens == round(tokens / 2)
    assert row.slot_tokens == 8 * 64
    assert row.packing_efficiency == pytest.approx(tokens / (2 * 8 * 64))
    assert row.real_tokens_per_s == pytest.approx(tokens / (2 * row.step_s))
    assert row.real_tokens_per_s_per_rank == row.real_tokens_per_s
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s
    assert row.communication_s == 0
    assert row.mfu == pytest.approx(row.model_flops_per_s_per_rank / 1e12)
    assert row.mfu_6n == pytest.approx(6 * training.work.parameters * row.real_tokens_per_s / 1e12)
    assert row.peak_memory_bytes > 2**27
    assert (row.head_overflows, row.recompilations) == (3, 2)
    assert row.loss == pytest.approx(math.log(128), rel=0.1)
    again = meter.take(batches, 2)
    meter.add(again, training.step.run(again, 1e-3))
    assert _close(meter, step=2).real_tokens == sum(batch.real_tokens for batch in again)


def test_without_a_peak_there_is_no_mfu(rig):
    training, meter, batches = rig
    meter._facts = DeviceFacts(work=training.work, peak_flops_per_s=None)
    taken = meter.take(batches, 2)
    meter.add(taken, training.step.run(taken, 1e-3))
    row = _close(meter)
    assert row.mfu is None
    assert row.mfu_6n is None
    assert row.model_flops_per_s_per_rank > 0


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_numbers_that_are_none_end_the_run(rig, loss, norm):
    _, meter, batches = rig
    now = Mark(0.0)
    result = StepResult(
        loss_share=torch.tensor(loss), grad_norm=torch.tensor(norm), partial=None, began=now, departed=None,
        reduced=now, updated=now,
    )  # fmt: skip
    meter.add(meter.take(batches, 1), result)
    with pytest.raises(TrainingFailed, match="step 1"):
        _close(meter)
