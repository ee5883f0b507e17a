"""Rows of a meter that compare three ranks, and its findings about slow ones."""

from dataclasses import dataclass

import pytest
import torch

from tests.trainer.record.meters import LEAST_TORCH_BYTES, close_interval
from tests.trainer.step_results import result_of
from trainer.formats.gpu_activity import GpuActivity
from trainer.formats.run_record import StepRow
from trainer.health.findings import Kind
from trainer.record.gpu_reader import GpuReader
from trainer.record.interval import table_by_rank
from trainer.record.meter import Meter
from trainer.record.pace_monitor import STREAK_ROWS
from trainer.runtime.ranks import Ranks

STEP_S = 1.0
SLOW_RANK = 1
SLOW_FACTOR = 1.5
"""Compute time of the slow rank as a multiple of the others'."""
WAITING_RANK = 2
ENDLESS_WAIT_S = 1e9
"""Data wait that is longer than any step of these tests takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeRanks(Ranks):
    """Rank 0 of three, whose sums have made-up entries of the other two.

    The third rank has twice the peak memory of rank 0.
    """

    compute_factors: tuple[float, ...] = (1.0, SLOW_FACTOR, 1.0)
    """Compute time of each rank as a multiple of rank 0's."""
    data_waits_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Data wait of each rank per step, in seconds."""

    def all_reduce_async(self, tensor):
        compute_s, data_wait_s, peak_memory_bytes, *_ = table_by_rank(tensor)
        own_compute_s = float(compute_s[0])
        if own_compute_s:  # else the first interval, which has no pace before it
            for rank, factor in enumerate(self.compute_factors):
                compute_s[rank] = own_compute_s * factor
                data_wait_s[rank] = self.data_waits_s[rank]
        peak_memory_bytes[2] = 2 * peak_memory_bytes[0]
        return lambda: None


@pytest.fixture
def meter_of(training):
    """Function that returns the meter of rank 0, given fields of ``ThreeRanks``."""

    def make(*, gpu_reader=None, **rank_fields) -> Meter:
        ranks = ThreeRanks(
            rank=0,
            local_rank=0,
            local_world_size=3,
            world_size=3,
            device=torch.device("cpu"),
            **rank_fields,
        )
        unread = GpuReader(dict.fromkeys(range(3)))
        return Meter(training.work, ranks, gpu_reader or unread)

    return make


@pytest.fixture
def train(batches):
    """Function that counts steps which are not computed, and returns a row of each.

    Compute lasts for ``gradients_sent_s`` of a step; None if that is unknown.
    """

    def train_steps(
        meter: Meter, *, steps: int = 3, gradients_sent_s: float | None = STEP_S / 2
    ) -> list[StepRow]:
        rows = []
        for step in range(1, steps + 1):
            result = result_of(computed_s=STEP_S, gradients_sent_s=gradients_sent_s)
            meter.add(batches[:1], result)
            rows.append(close_interval(meter, step=step))
        return rows

    return train_steps


def test_names_the_slowest_rank_of_the_previous_interval(meter_of, train):
    first, second, third = train(meter_of())
    assert (first.slowest_rank, first.slowest_rank_ratio) == (None, None)
    assert (second.slowest_rank, third.slowest_rank) == (SLOW_RANK, SLOW_RANK)
    assert second.slowest_rank_ratio == pytest.approx(SLOW_FACTOR)


def test_communication_begins_when_gradients_depart(meter_of, train):
    first, *_ = train(meter_of(), gradients_sent_s=0.75 * STEP_S)
    assert first.compute_s == 0.75 * STEP_S
    assert first.communication_s == 0.25 * STEP_S


def test_peak_memory_is_the_maximum_over_ranks(meter_of, train):
    _, second, _ = train(meter_of())
    assert second.peak_memory_bytes > 2 * LEAST_TORCH_BYTES


def test_slowest_rank_is_unknown_without_departure_times(meter_of, train):
    rows = train(meter_of(), gradients_sent_s=None)
    assert len(rows) == 3
    for row in rows:
        assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
        assert row.communication_s is None


@pytest.mark.parametrize(
    "gradients_sent_s",
    [
        pytest.param(STEP_S / 2, id="compute is known"),
        pytest.param(None, id="compute is unknown"),
    ],
)
def test_names_the_rank_with_the_longest_data_wait(meter_of, train, gradients_sent_s):
    meter = meter_of(data_waits_s=(0.0, 2.0, 3.0))
    rows = train(meter, gradients_sent_s=gradients_sent_s)
    # The first row has no interval before it.
    assert [row.longest_data_wait_s for row in rows] == [None, 3.0, 3.0]
    assert [row.longest_data_wait_rank for row in rows] == [
        None,
        WAITING_RANK,
        WAITING_RANK,
    ]


class NodeReader(GpuReader):
    """Reader of a node of three GPUs, of which one is unreadable."""

    def take(self):
        return {
            0: GpuActivity(busy_share=1.0, sm_active_share=0.5),
            1: GpuActivity(),
            2: GpuActivity(busy_share=0.5),
        }


def test_gpu_activity_is_the_mean_of_readable_gpus(meter_of, train):
    row, *_ = train(meter_of(gpu_reader=NodeReader(dict.fromkeys(range(3)))))
    assert row.gpu_busy_share == 0.75
    assert row.sm_active_share == 0.5
    assert row.gpu_power_w is None


def test_names_the_rank_of_the_least_busy_gpu(meter_of, train):
    row, *_ = train(meter_of(gpu_reader=NodeReader(dict.fromkeys(range(3)))))
    assert (row.lowest_gpu_busy_share, row.lowest_gpu_busy_rank) == (0.5, 2)


@pytest.mark.parametrize(
    ("rank_fields", "kind", "rank"),
    [
        pytest.param({}, Kind.STRAGGLER, SLOW_RANK, id="straggler"),
        pytest.param(
            {
                "compute_factors": (1.0, 1.0, 1.0),
                "data_waits_s": (0.0, 0.0, ENDLESS_WAIT_S),
            },
            Kind.STARVED,
            WAITING_RANK,
            id="starved",
        ),
    ],
)
def test_findings_are_taken_once(meter_of, train, rank_fields, kind, rank):
    meter = meter_of(**rank_fields)
    # Enough rows for a finding, and for another if it were repeated.
    train(meter, steps=3 * STREAK_ROWS)
    (finding,) = meter.take_findings()
    assert (finding.kind, finding.values["rank"]) == (kind, rank)
    assert meter.take_findings() == []
