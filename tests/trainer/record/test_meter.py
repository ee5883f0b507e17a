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

PEAK_FLOPS_PER_S = 1e12
TOKENS_PER_SEQUENCE = 64
SEQUENCES_PER_STEP = 8
"""Two micro-batches of four sequences."""
VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A training, its meter, and its micro-batches in order."""

    training: Training
    meter: Meter
    batches: Iterator[MicroBatch]

    def train_step(self, *, measure_partial=True):
        """Take a step of two micro-batches, and return its non-padding tokens."""
        taken = self.meter.take(self.batches, 2)
        result = self.training.step.run(taken, 1e-3, measure_partial=measure_partial)
        self.meter.add(taken, result)
        return sum(batch.non_padding_tokens for batch in taken)

    def add(self, result):
        """Count a step that was not computed, with a micro-batch of the dataset."""
        self.meter.add(self.meter.take(self.batches, 1), result)


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
    meter.close(
        step, learning_rate=0.1, head_overflows=3, recompilations=2, skipped_steps=4
    )
    (row,) = meter.rows()
    return row


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


def test_row_of_a_single_rank(rig):
    rig.train_step()
    rig.train_step()
    row = close(rig.meter)
    # An untrained model predicts all tokens with about the same probability.
    assert row.loss == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert row.tokens_per_s_per_rank == row.tokens_per_s
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s
    assert row.communication_s == 0
    assert row.mfu == pytest.approx(row.model_flops_per_s_per_rank / PEAK_FLOPS_PER_S)
    six_n_flops_per_s = 6 * rig.training.work.parameters * row.tokens_per_s
    assert row.mfu_6n == pytest.approx(six_n_flops_per_s / PEAK_FLOPS_PER_S)
    assert row.peak_memory_bytes > 2**27  # torch alone takes more
    assert (row.head_overflows, row.recompilations, row.skipped_steps) == (3, 2, 4)
    assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)],
)
def test_non_finite_metrics_are_missing_from_the_row(rig, loss, norm):
    rig.add(result_of(loss, norm, computed_s=1.0))
    row = close(rig.meter)
    assert row.loss == (loss if math.isfinite(loss) else None)
    assert row.grad_norm == (norm if math.isfinite(norm) else None)


def test_mfu_is_missing_without_a_known_peak(rig_of):
    rig = rig_of(peak_flops_per_s=None)
    rig.add(result_of(computed_s=1.0))
    row = close(rig.meter)
    assert (row.mfu, row.mfu_6n) == (None, None)
    assert row.model_flops_per_s_per_rank > 0


def test_non_finite_step_leaves_the_noise_scale(rig):
    rig.train_step()
    close(rig.meter)
    before = rig.meter.noise.parts
    assert before != [0.0, 0.0]
    partial = PartialGradient(square=torch.tensor(math.nan), share=0.5)
    rig.add(result_of(math.nan, math.nan, partial=partial))
    close(rig.meter, step=2)
    assert rig.meter.noise.parts == before


def test_rows_of_undone_steps_are_discarded(rig):
    rig.add(result_of())
    rig.meter.close(
        1, learning_rate=0.1, head_overflows=0, recompilations=0, skipped_steps=0
    )
    rig.add(result_of())
    rig.meter.discard()
    assert list(rig.meter.rows(wait_for_all=True)) == []
    assert rig.meter.open_steps == 0
    rig.add(result_of())
    assert close(rig.meter).step == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeRanks(Ranks):
    """Rank 0 of three, whose sums have made-up entries of the other two."""

    compute_factors: tuple[float, ...] = (1.0, 1.5, 1.0)
    """Compute time of each rank as a multiple of rank 0's."""
    data_waits_s: tuple[float, ...] = (0.0, 0.0, 0.0)

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
def three_ranks(rig):
    """Function that trains on three ranks, and returns the meter and a row per step."""
    batch = next(rig.batches)

    def train(steps=3, departed_s=0.5, **changes):
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
            meter.add([batch], result_of(computed_s=1.0, departed_s=departed_s))
            rows.append(close(meter, step))
        return meter, rows

    return train


def test_names_the_slowest_rank_of_the_previous_interval(three_ranks):
    _, (first, second, third) = three_ranks()
    assert (first.slowest_rank, first.slowest_rank_ratio) == (None, None)
    assert (second.slowest_rank, third.slowest_rank) == (1, 1)
    assert second.slowest_rank_ratio == pytest.approx(1.5)
    assert (second.compute_s, second.communication_s) == (0.5, 0.5)


def test_peak_memory_is_that_of_the_rank_with_most(three_ranks):
    _, (_, second, _) = three_ranks()
    # The last rank's, which is twice that of a process with torch.
    assert second.peak_memory_bytes > 2 * 2**27


def test_slowest_rank_is_unknown_without_departure_times(three_ranks):
    _, rows = three_ranks(departed_s=None)
    for row in rows:
        assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
        assert row.communication_s is None


@pytest.mark.parametrize("departed_s", [0.5, None])
def test_names_the_rank_with_the_longest_data_wait(three_ranks, departed_s):
    _, rows = three_ranks(data_waits_s=(0.0, 2.0, 3.0), departed_s=departed_s)
    assert [(row.longest_data_wait_s, row.longest_data_wait_rank) for row in rows] == [
        (None, None),
        (3.0, 2),
        (3.0, 2),
    ]


EVEN_COMPUTE = (1.0, 1.0, 1.0)


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
def test_diagnoses_are_taken_once(three_ranks, changes, kind, rank):
    meter, _ = three_ranks(steps=12, **changes)
    (diagnosis,) = meter.take_diagnoses()
    assert (diagnosis.kind, diagnosis.values["rank"]) == (kind, rank)
    assert meter.take_diagnoses() == []
