"""Rows of a meter on a single rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.trainer.record.meters import (
    LEAST_TORCH_BYTES,
    LOOP_FIELDS,
    close_interval,
)
from tests.trainer.step_results import result_of
from trainer.build import Training
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.step import PartialGradient, StepResult
from trainer.formats.gpu_activity import GpuActivity
from trainer.record.gpu_reader import GpuReader
from trainer.record.meter import Meter
from trainer.runtime.ranks import join_ranks

PEAK_FLOPS_PER_S = 1e12
TOKENS_PER_SEQUENCE = 64
SEQUENCES_PER_STEP = 8
VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class MeteredTraining:
    """A training, its meter, and its micro-batches in order."""

    training: Training
    meter: Meter
    batches: Iterator[MicroBatch]

    def train_step(self, *, measure_partial: bool = True) -> int:
        """Take a step of two micro-batches, and return its non-padding tokens."""
        taken = self.meter.take(self.batches, 2)
        result = self.training.step.run(
            taken,
            lr=0.0,  # so that the weights stay
            measure_partial=measure_partial,
        )
        self.meter.add(taken, result)
        return sum(batch.non_padding_tokens for batch in taken)

    def add(self, result: StepResult) -> None:
        """Count a step that was not computed, with a micro-batch of the dataset."""
        self.meter.add(self.meter.take(self.batches, 1), result)


@pytest.fixture
def metered_training_of(training, two_part_config, batches):
    """Function that returns a metered training on a device with the given peak."""

    def make(peak_flops_per_s: float | None) -> MeteredTraining:
        ranks = join_ranks(two_part_config, environment={})
        return MeteredTraining(
            training=training,
            meter=Meter(
                training.work,
                ranks,
                GpuReader({0: None}),
                peak_flops_per_s=peak_flops_per_s,
            ),
            batches=iter(batches),
        )

    return make


@pytest.fixture
def metered(metered_training_of) -> MeteredTraining:
    return metered_training_of(PEAK_FLOPS_PER_S)


def test_row_has_means_of_its_steps(metered):
    tokens = metered.train_step() + metered.train_step()
    row = close_interval(metered.meter)
    padded_tokens = SEQUENCES_PER_STEP * TOKENS_PER_SEQUENCE
    assert row.non_padding_tokens == round(tokens / 2)
    assert row.padded_tokens == padded_tokens
    assert row.packing_efficiency == pytest.approx(tokens / (2 * padded_tokens))
    assert row.tokens_per_s == pytest.approx(tokens / (2 * row.step_s))


def test_row_leaves_out_steps_of_earlier_rows(metered):
    metered.train_step()
    close_interval(metered.meter)
    tokens = metered.train_step(measure_partial=False)
    assert close_interval(metered.meter, step=2).non_padding_tokens == tokens


def test_row_has_the_loss_of_its_last_step(metered):
    metered.add(result_of(loss=3.0, norm=5.0))
    metered.add(result_of(loss=2.0, norm=4.0))
    row = close_interval(metered.meter)
    assert (row.loss, row.grad_norm) == (2.0, 4.0)


def test_untrained_model_has_the_loss_of_guessing(metered):
    metered.train_step()
    # If all tokens are equally likely, the loss is log(vocabulary). Initial weights are
    # small, but not zero, and add a few percent.
    loss = close_interval(metered.meter).loss
    assert loss == pytest.approx(math.log(VOCABULARY), rel=0.1)


def test_parts_of_a_step_fit_into_it(metered):
    metered.train_step()
    metered.train_step()
    row = close_interval(metered.meter)
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s


def test_mfu_is_a_share_of_the_peak(metered):
    metered.train_step()
    row = close_interval(metered.meter)
    assert row.mfu == pytest.approx(row.model_flops_per_s_per_rank / PEAK_FLOPS_PER_S)
    six_n_flops_per_s = 6 * metered.training.work.parameters * row.tokens_per_s
    assert row.mfu_6n == pytest.approx(six_n_flops_per_s / PEAK_FLOPS_PER_S)


class FilledReader(GpuReader):
    """Reader of a single GPU that has always read the same."""

    def take(self):
        return {0: GpuActivity(busy_share=0.75, power_w=300.0)}


def test_row_has_the_activity_of_its_gpu(training, two_part_config, batches):
    ranks = join_ranks(two_part_config, environment={})
    meter = Meter(training.work, ranks, FilledReader({0: "GPU-0"}))
    meter.add(batches[:1], result_of())
    row = close_interval(meter)
    assert (row.gpu_busy_share, row.gpu_power_w) == (0.75, 300.0)
    assert (row.lowest_gpu_busy_share, row.lowest_gpu_busy_rank) == (0.75, 0)
    assert (row.sm_active_share, row.sm_clock_mhz) == (None, None)


def test_row_has_no_activity_without_a_gpu(metered):
    metered.train_step()
    row = close_interval(metered.meter)
    assert row.gpu_busy_share is None
    assert (row.lowest_gpu_busy_share, row.lowest_gpu_busy_rank) == (None, None)


def test_mfu_is_missing_without_a_known_peak(metered_training_of):
    metered = metered_training_of(peak_flops_per_s=None)
    metered.add(result_of(computed_s=1.0))
    row = close_interval(metered.meter)
    assert (row.mfu, row.mfu_6n) == (None, None)
    assert row.model_flops_per_s_per_rank > 0


def test_peak_memory_contains_that_of_torch(metered):
    metered.train_step()
    assert close_interval(metered.meter).peak_memory_bytes > LEAST_TORCH_BYTES


def test_row_has_the_fields_of_the_training_loop(metered):
    metered.train_step()
    row = close_interval(metered.meter, step=7)
    assert {name: getattr(row, name) for name in LOOP_FIELDS} == LOOP_FIELDS
    assert row.step == 7


def test_single_rank_is_not_compared_with_others(metered):
    for step in (1, 2):  # ranks are compared from the second row on
        metered.train_step()
        row = close_interval(metered.meter, step=step)
    assert row.tokens_per_s_per_rank == row.tokens_per_s
    assert row.communication_s == 0
    assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
    assert (row.longest_data_wait_s, row.longest_data_wait_rank) == (None, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_is_missing_from_the_row(metered, loss):
    metered.add(result_of(loss=loss, norm=1.0, computed_s=1.0))
    row = close_interval(metered.meter)
    assert (row.loss, row.grad_norm) == (None, 1.0)


@pytest.mark.parametrize("norm", [math.nan, -math.inf])
def test_non_finite_norm_is_missing_from_the_row(metered, norm):
    metered.add(result_of(loss=2.0, norm=norm, computed_s=1.0))
    row = close_interval(metered.meter)
    assert (row.loss, row.grad_norm) == (2.0, None)


def test_non_finite_step_leaves_the_noise_scale(metered):
    metered.train_step()
    close_interval(metered.meter)
    before = metered.meter.noise.signal_and_noise
    assert before != [0.0, 0.0]
    partial = PartialGradient(squared_norm=torch.tensor(math.nan), share=0.5)
    metered.add(result_of(loss=math.nan, norm=math.nan, partial=partial))
    close_interval(metered.meter, step=2)
    assert metered.meter.noise.signal_and_noise == before


def test_rows_of_undone_steps_are_discarded(metered):
    metered.add(result_of())
    metered.meter.close(1, **LOOP_FIELDS)
    metered.add(result_of())  # in the interval that is open
    metered.meter.discard()
    assert list(metered.meter.take_rows(wait_for_all=True)) == []
    assert metered.meter.open_steps == 0
    metered.add(result_of())
    assert close_interval(metered.meter).step == 1
