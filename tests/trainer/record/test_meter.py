import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.trainer.oracles import config_of, micro_batches, result_of, training_of
from trainer.build import Training
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.ranks import Ranks, join_ranks
from trainer.distributed.step import PartialGradient
from trainer.health.events import Kind
from trainer.record.interval import table_by_rank
from trainer.record.meter import Meter
from trainer.record.pace_monitor import STREAK_ROWS

PEAK_FLOPS_PER_S = 1e12
TOKENS_PER_SEQUENCE = 64
SEQUENCES_PER_STEP = 8
"""Two micro-batches of four sequences."""
VOCABULARY = 128
LEARNING_RATE = 1e-3
LOOP_FIELDS = {
    "learning_rate": LEARNING_RATE,
    "head_overflows": 3,
    "recompilations": 2,
    "skipped_steps": 4,
}
"""Fields of a row that the training loop passes."""
LEAST_TORCH_BYTES = 2**27
"""Memory that every process with torch exceeds."""
EVEN_COMPUTE = (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A training, its meter, and its micro-batches in order."""

    training: Training
    meter: Meter
    batches: Iterator[MicroBatch]

    def train_step(self, *, measure_partial=True):
        """Take a step of two micro-batches, and return its non-padding tokens."""
        taken = self.meter.take(self.batches, 2)
        result = self.training.step.run(
            taken, LEARNING_RATE, measure_partial=measure_partial
        )
        self.meter.add(taken, result)
        return sum(batch.non_padding_tokens for batch in taken)

    def add(self, result):
        """Count a step that was not computed, with a micro-batch of the dataset."""
        self.meter.add(self.meter.take(self.batches, 1), result)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeRanks(Ranks):
    """Rank 0 of three, whose sums have made-up entries of the other two.

    The third rank has twice the peak memory of rank 0.
    """

    compute_factors: tuple[float, ...] = (1.0, 1.5, 1.0)
    """Compute time of each rank as a multiple of rank 0's."""
    data_waits_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Data wait of each rank per step, in seconds."""

    def all_reduce_async(self, tensor):
        compute_s, data_wait_s, peak_memory_bytes = table_by_rank(tensor)
        own_compute_s = float(compute_s[0])
        if own_compute_s:  # else the first interval, which has no pace before it
            for rank, factor in enumerate(self.compute_factors):
                compute_s[rank] = own_compute_s * factor
                data_wait_s[rank] = self.data_waits_s[rank]
        peak_memory_bytes[2] = 2 * peak_memory_bytes[0]
        return lambda: None


@pytest.fixture
def rig_of(dataset):
    """Function that returns a rig, whose device may have an unknown peak."""
    config = config_of(micro_batch_size=4)
    training = training_of(config, dataset)

    def make(peak_flops_per_s=PEAK_FLOPS_PER_S) -> Rig:
        ranks = join_ranks(config, environment={})
        return Rig(
            training=training,
            meter=Meter(training.work, ranks, peak_flops_per_s=peak_flops_per_s),
            batches=iter(micro_batches(dataset, config, steps=8)),
        )

    return make


@pytest.fixture
def rig(rig_of):
    return rig_of()


def close(meter, step=1):
    """Close the interval, and return its row."""
    meter.close(step, **LOOP_FIELDS)
    (row,) = meter.rows()
    return row


@pytest.fixture
def three_ranks(rig):
    """Function that returns a meter of three ranks, and its rows, one for each step.

    A step takes a second, of which compute lasts until ``gradients_sent_s``, if known.
    """
    batch = next(rig.batches)

    def train(steps=3, gradients_sent_s=0.5, **changes):
        ranks = ThreeRanks(
            rank=0,
            local_rank=0,
            local_world_size=3,
            world_size=3,
            device=torch.device("cpu"),
            **changes,
        )
        meter = Meter(rig.training.work, ranks)
        rows = []
        for step in range(1, steps + 1):
            meter.add(
                [batch], result_of(computed_s=1.0, gradients_sent_s=gradients_sent_s)
            )
            rows.append(close(meter, step))
        return meter, rows

    return train


def test_row_has_means_of_its_steps(rig):
    tokens = rig.train_step() + rig.train_step()
    row = close(rig.meter)
    padded_tokens = SEQUENCES_PER_STEP * TOKENS_PER_SEQUENCE
    assert row.non_padding_tokens == round(tokens / 2)
    assert row.padded_tokens == padded_tokens
    assert row.packing_efficiency == pytest.approx(tokens / (2 * padded_tokens))
    assert row.tokens_per_s == pytest.approx(tokens / (2 * row.step_s))


def test_row_leaves_out_steps_of_earlier_rows(rig):
    rig.train_step()
    close(rig.meter)
    tokens = rig.train_step(measure_partial=False)
    assert close(rig.meter, step=2).non_padding_tokens == tokens


def test_row_has_the_loss_of_its_last_step(rig):
    rig.add(result_of(loss=3.0, norm=5.0))
    rig.add(result_of(loss=2.0, norm=4.0))
    row = close(rig.meter)
    assert (row.loss, row.grad_norm) == (2.0, 4.0)


def test_untrained_model_has_the_loss_of_guessing(rig):
    rig.train_step()
    # It predicts all tokens with nearly, but not exactly, the same probability.
    assert close(rig.meter).loss == pytest.approx(math.log(VOCABULARY), rel=0.1)


def test_parts_of_a_step_fit_into_it(rig):
    rig.train_step()
    rig.train_step()
    row = close(rig.meter)
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s


def test_mfu_is_a_share_of_the_peak(rig):
    rig.train_step()
    row = close(rig.meter)
    assert row.mfu == pytest.approx(row.model_flops_per_s_per_rank / PEAK_FLOPS_PER_S)
    six_n_flops_per_s = 6 * rig.training.work.parameters * row.tokens_per_s
    assert row.mfu_6n == pytest.approx(six_n_flops_per_s / PEAK_FLOPS_PER_S)


def test_peak_memory_contains_that_of_torch(rig):
    rig.train_step()
    assert close(rig.meter).peak_memory_bytes > LEAST_TORCH_BYTES


def test_row_has_the_fields_of_the_training_loop(rig):
    rig.train_step()
    row = close(rig.meter, step=7)
    assert {name: getattr(row, name) for name in LOOP_FIELDS} == LOOP_FIELDS
    assert row.step == 7


def test_single_rank_is_not_compared_with_others(rig):
    for step in (1, 2):  # ranks are compared from the second row on
        rig.train_step()
        row = close(rig.meter, step)
    assert row.tokens_per_s_per_rank == row.tokens_per_s
    assert row.communication_s == 0
    assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
    assert (row.longest_data_wait_s, row.longest_data_wait_rank) == (None, None)


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        pytest.param(math.nan, 1.0, (None, 1.0), id="loss is NaN"),
        pytest.param(math.inf, 1.0, (None, 1.0), id="loss is infinite"),
        pytest.param(2.0, math.nan, (2.0, None), id="norm is NaN"),
        pytest.param(2.0, -math.inf, (2.0, None), id="norm is infinite"),
    ],
)
def test_non_finite_metrics_are_missing_from_the_row(rig, loss, norm, expected):
    rig.add(result_of(loss, norm, computed_s=1.0))
    row = close(rig.meter)
    assert (row.loss, row.grad_norm) == expected


def test_mfu_is_missing_without_a_known_peak(rig_of):
    rig = rig_of(peak_flops_per_s=None)
    rig.add(result_of(computed_s=1.0))
    row = close(rig.meter)
    assert (row.mfu, row.mfu_6n) == (None, None)
    assert row.model_flops_per_s_per_rank > 0


def test_non_finite_step_leaves_the_noise_scale(rig):
    rig.train_step()
    close(rig.meter)
    before = rig.meter.noise.signal_and_noise
    assert before != [0.0, 0.0]
    partial = PartialGradient(squared_norm=torch.tensor(math.nan), share=0.5)
    rig.add(result_of(math.nan, math.nan, partial=partial))
    close(rig.meter, step=2)
    assert rig.meter.noise.signal_and_noise == before


def test_rows_of_undone_steps_are_discarded(rig):
    rig.add(result_of())
    rig.meter.close(1, **LOOP_FIELDS)
    rig.add(result_of())  # in the interval that is open
    rig.meter.discard()
    assert list(rig.meter.rows(wait_for_all=True)) == []
    assert rig.meter.open_steps == 0
    rig.add(result_of())
    assert close(rig.meter).step == 1


def test_names_the_slowest_rank_of_the_previous_interval(three_ranks):
    _, (first, second, third) = three_ranks()
    assert (first.slowest_rank, first.slowest_rank_ratio) == (None, None)
    assert (second.slowest_rank, third.slowest_rank) == (1, 1)
    assert second.slowest_rank_ratio == pytest.approx(1.5)


def test_communication_begins_when_gradients_depart(three_ranks):
    _, (first, *_) = three_ranks(gradients_sent_s=0.75)
    assert (first.compute_s, first.communication_s) == (0.75, 0.25)


def test_peak_memory_is_the_maximum_over_ranks(three_ranks):
    _, (_, second, _) = three_ranks()
    assert second.peak_memory_bytes > 2 * LEAST_TORCH_BYTES


def test_slowest_rank_is_unknown_without_departure_times(three_ranks):
    _, rows = three_ranks(gradients_sent_s=None)
    for row in rows:
        assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
        assert row.communication_s is None


@pytest.mark.parametrize(
    "gradients_sent_s",
    [
        pytest.param(0.5, id="compute is known"),
        pytest.param(None, id="compute is unknown"),
    ],
)
def test_names_the_rank_with_the_longest_data_wait(three_ranks, gradients_sent_s):
    _, rows = three_ranks(
        data_waits_s=(0.0, 2.0, 3.0), gradients_sent_s=gradients_sent_s
    )
    assert [(row.longest_data_wait_s, row.longest_data_wait_rank) for row in rows] == [
        (None, None),
        (3.0, 2),
        (3.0, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "rank"),
    [
        pytest.param({}, Kind.STRAGGLER, 1.0, id="straggler"),
        pytest.param(
            {"compute_factors": EVEN_COMPUTE, "data_waits_s": (0.0, 0.0, 1e9)},
            Kind.STARVED,
            2.0,
            id="starved",
        ),
    ],
)
def test_findings_are_taken_once(three_ranks, changes, kind, rank):
    # Enough rows for a finding, and for another if it were repeated.
    meter, _ = three_ranks(steps=3 * STREAK_ROWS, **changes)
    (finding,) = meter.take_findings()
    assert (finding.kind, finding.values["rank"]) == (kind, rank)
    assert meter.take_findings() == []
