import math
import random
import re
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, micro_batches, result_of, training_of
from trainer.distributed.ranks import Ranks, join_ranks
from trainer.distributed.step import PartialGradient
from trainer.health.events import Action, Kind
from trainer.health.robust_statistics import (
    centre_and_scatter,
    level_and_scatter,
    median_and_error,
    median_of_sorted,
)
from trainer.record.meter import (
    STARVED_SHARE,
    STRAGGLER_RATIO,
    STREAK_ROWS,
    Meter,
    NoiseScale,
    PaceMonitor,
)


@pytest.fixture
def rig(dataset):
    config = config_of(micro_batch_size=4)
    training = training_of(config, dataset)
    meter = Meter(
        training.work, join_ranks(config, environment={}), peak_flops_per_s=1e12
    )
    return training, meter, iter(micro_batches(dataset, config, steps=8))


def _close(meter, step=1):
    meter.close(
        step, learning_rate=0.1, head_overflows=3, recompilations=2, skipped_steps=4
    )
    (row,) = meter.rows()
    return row


def test_row_covers_the_steps_since_the_last(rig):
    training, meter, batches = rig
    tokens = 0
    for _ in range(2):
        taken = meter.take(batches, 2)
        tokens += sum(batch.non_padding_tokens for batch in taken)
        meter.add(taken, training.step.run(taken, 1e-3, measure_partial=True))
    row = _close(meter)
    assert row.non_padding_tokens == round(tokens / 2)
    assert row.padded_tokens == 8 * 64
    assert row.packing_efficiency == pytest.approx(tokens / (2 * 8 * 64))
    assert row.tokens_per_s == pytest.approx(tokens / (2 * row.step_s))
    again = meter.take(batches, 2)
    meter.add(again, training.step.run(again, 1e-3))
    assert _close(meter, step=2).non_padding_tokens == sum(
        batch.non_padding_tokens for batch in again
    )


def test_row_of_a_single_rank(rig):
    training, meter, batches = rig
    for _ in range(2):
        taken = meter.take(batches, 2)
        meter.add(taken, training.step.run(taken, 1e-3, measure_partial=True))
    row = _close(meter)
    assert row.loss == pytest.approx(math.log(128), rel=0.1)
    assert row.tokens_per_s_per_rank == row.tokens_per_s
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s
    assert row.communication_s == 0
    assert row.mfu == pytest.approx(row.model_flops_per_s_per_rank / 1e12)
    assert row.mfu_6n == pytest.approx(
        6 * training.work.parameters * row.tokens_per_s / 1e12
    )
    assert row.peak_memory_bytes > 2**27
    assert (row.head_overflows, row.recompilations, row.skipped_steps) == (3, 2, 4)
    assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)],
)
def test_non_finite_metrics_are_missing_from_the_row(rig, loss, norm):
    _, meter, batches = rig
    meter.add(meter.take(batches, 1), result_of(loss, norm, computed_s=1.0))
    row = _close(meter)
    assert row.loss == (loss if math.isfinite(loss) else None)
    assert row.grad_norm == (norm if math.isfinite(norm) else None)


def test_mfu_is_missing_without_a_known_peak(rig):
    _, meter, batches = rig
    meter._peak_flops_per_s = None
    meter.add(meter.take(batches, 1), result_of(computed_s=1.0))
    row = _close(meter)
    assert (row.mfu, row.mfu_6n) == (None, None)
    assert row.model_flops_per_s_per_rank > 0


def test_non_finite_step_leaves_the_noise_scale(rig):
    training, meter, batches = rig
    taken = meter.take(batches, 2)
    meter.add(taken, training.step.run(taken, 1e-3, measure_partial=True))
    _close(meter)
    before = meter.noise.parts
    assert before != [0.0, 0.0]
    partial = PartialGradient(square=torch.tensor(math.nan), share=0.5)
    meter.add(taken, result_of(math.nan, math.nan, partial=partial))
    _close(meter, step=2)
    assert meter.noise.parts == before


@dataclass(frozen=True, kw_only=True, slots=True)
class _ThreeRanks(Ranks):
    """Rank 0 of three, whose sums have made-up entries of the others."""

    compute_factors: tuple[float, ...] = (1.0, 1.5, 1.0)
    """Compute time of each rank as a multiple of rank 0's."""
    data_waits_s: tuple[float, ...] = (0.0, 0.0, 0.0)

    def all_reduce_async(self, tensor):
        own_compute_s = float(tensor[5])
        if own_compute_s:
            compute_s = [own_compute_s * factor for factor in self.compute_factors]
            tensor[5:11] = torch.tensor(
                compute_s + list(self.data_waits_s), dtype=tensor.dtype
            )
        tensor[13] = 2 * tensor[11]  # memory of the last rank
        return lambda: None


@pytest.fixture
def rows_of(rig):
    """Function that returns a meter of ``_ThreeRanks`` and the rows of some steps."""
    training, _, batches = rig
    batch = next(batches)

    def make(count=3, departed_s=0.5, **changes):
        ranks = _ThreeRanks(
            rank=0,
            local_rank=0,
            local_world_size=3,
            world_size=3,
            device=torch.device("cpu"),
            **changes,
        )
        meter = Meter(training.work, ranks)
        rows = []
        for step in range(1, count + 1):
            meter.add([batch], result_of(computed_s=1.0, departed_s=departed_s))
            rows.append(_close(meter, step))
        return meter, rows

    return make


def test_names_the_slowest_rank_of_the_previous_interval(rows_of):
    _, (first, second, third) = rows_of()
    assert (first.slowest_rank, first.slowest_rank_ratio) == (None, None)
    assert (second.slowest_rank, third.slowest_rank) == (1, 1)
    assert second.slowest_rank_ratio == pytest.approx(1.5)
    assert (second.compute_s, second.communication_s) == (0.5, 0.5)
    assert second.peak_memory_bytes > 2**28


def test_slowest_rank_is_unknown_without_departure_times(rows_of):
    _, rows = rows_of(departed_s=None)
    assert [
        (row.slowest_rank, row.slowest_rank_ratio, row.communication_s) for row in rows
    ] == [(None, None, None)] * 3


@pytest.mark.parametrize("departed_s", [0.5, None])
def test_names_the_rank_with_the_longest_data_wait(rows_of, departed_s):
    _, rows = rows_of(data_waits_s=(0.0, 2.0, 3.0), departed_s=departed_s)
    assert [(row.longest_data_wait_s, row.longest_data_wait_rank) for row in rows] == [
        (None, None),
        (3.0, 2),
        (3.0, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "rank"),
    [
        ({}, Kind.STRAGGLER, 1.0),
        (
            {"compute_factors": (1.0, 1.0, 1.0), "data_waits_s": (0.0, 0.0, 1e9)},
            Kind.STARVED,
            2.0,
        ),
    ],
    ids=["straggler", "starved"],
)
def test_diagnoses_are_taken_once(rows_of, changes, kind, rank):
    meter, _ = rows_of(12, **changes)
    (diagnosis,) = meter.take_diagnoses()
    assert (diagnosis.kind, diagnosis.values["rank"]) == (kind, rank)
    assert meter.take_diagnoses() == []


def test_rows_of_undone_steps_are_discarded(rig):
    _, meter, batches = rig
    taken = meter.take(batches, 2)
    meter.add(taken, result_of())
    meter.close(
        1, learning_rate=0.1, head_overflows=0, recompilations=0, skipped_steps=0
    )
    meter.add(taken, result_of())
    meter.discard()
    assert list(meter.rows(wait_for_all=True)) == []
    assert meter.open_steps == 0
    meter.add(taken, result_of())
    assert _close(meter).step == 1


def test_noise_scale_of_known_gradients():
    """Gradients of single tokens with a known mean and variance.

    Parts and wholes are their means.
    """
    rng = np.random.default_rng(0)
    signal = rng.normal(size=50)
    noise = 30.0
    tokens = 400
    parts = 8
    expected = 50 * noise**2 / float(signal @ signal)
    scale = NoiseScale()
    assert scale.tokens is None
    for _ in range(300):
        deviations = rng.normal(size=(parts, 50)) / np.sqrt(tokens / parts)
        part_means = signal + noise * deviations
        whole = part_means.mean(axis=0)
        scale.update(
            float(whole @ whole),
            float(np.square(part_means).sum(axis=1).mean()),
            1 / parts,
            tokens,
        )
    # Smoothing looks back ten steps, so single values scatter.
    assert scale.tokens == pytest.approx(expected, rel=0.6)


def test_noise_scale_is_unknown_below_the_noise():
    scale = NoiseScale()
    scale.update(1.0, 10.0, 0.5, 100)
    assert scale.tokens is None


EQUAL_COMPUTE_S = [1.0, 1.0, 1.0, 1.0]


def findings_of(rows):
    """Return the number, counted from 1, and kind of each finding.

    Rows are pairs of each rank's data waits and compute times.
    """
    monitor = PaceMonitor()
    findings = []
    for number, (data_wait_s, compute_s) in enumerate(rows, start=1):
        diagnoses = monitor.check(
            step_s=1.0, data_wait_s=data_wait_s, compute_s=compute_s
        )
        findings += [(number, diagnosis.kind) for diagnosis in diagnoses]
    return findings


def waiting(share, count):
    """Rows in which a rank waits for data for a share of the time."""
    return [([0.0, share, 0.0, 0.0], EQUAL_COMPUTE_S)] * count


def slow(ratio, count):
    """Rows in which a rank computes for a multiple of the others' time."""
    return [([0.0] * 4, [1.0, 1.0, ratio, 1.0])] * count


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            waiting(0.0, STREAK_ROWS) + waiting(0.2, 50),
            [(2 * STREAK_ROWS, Kind.STARVED)],
        ),
        (waiting(0.9, STREAK_ROWS) + waiting(0.0, 50), []),
        (waiting(0.9, 50), [(2 * STREAK_ROWS, Kind.STARVED)]),
    ],
    ids=["later", "in the first rows", "always"],
)
def test_reports_slow_data_loading_once(rows, expected):
    assert findings_of(rows) == expected


@pytest.fixture
def straggler_and_starved():
    """Findings about a rank that computes slowly, and another that waits for data."""
    monitor = PaceMonitor(hosts=("n1", "n1", "n2"))
    diagnoses = []
    for _ in range(2 * STREAK_ROWS):
        diagnoses += monitor.check(
            step_s=2.0,
            data_wait_s=[0.0, 0.1, 0.5, 0.0, 0.0],
            compute_s=[1.0, 1.0, 1.0, 2.0, 3.0],
        )
    straggler, starved = diagnoses
    return straggler, starved


def test_describes_straggler(straggler_and_starved):
    straggler, _ = straggler_and_starved
    assert (straggler.kind, straggler.action) == (Kind.STRAGGLER, Action.WARN)
    assert straggler.values == {
        "rank": 4.0,
        "ratio": 3.0,
        "compute_s": 3.0,
        "median_s": 1.0,
    }
    assert re.search(r"rank 4 takes 3\.00 times.*also slow: 3", straggler.message)
    assert "nvidia-smi -q -d PERFORMANCE" in straggler.next_step
    assert any("heat" in cause for cause in straggler.event(1).causes)


def test_describes_slow_data_loading(straggler_and_starved):
    _, starved = straggler_and_starved
    assert (starved.kind, starved.action) == (Kind.STARVED, Action.WARN)
    assert starved.values == {
        "rank": 2.0,
        "share": 0.25,
        "data_wait_s": 0.5,
        "step_s": 2.0,
    }
    assert "rank 2 (n2) waits for data 25% of the time" in starved.message
    assert "autotune workers PROFILE" in starved.next_step
    assert "train.data.num_workers" in starved.next_step
    assert "train.data.stage_to" in starved.next_step


BAD_ROWS = pytest.mark.parametrize(
    ("bad", "first"),
    [(waiting(0.5, 1), 2 * STREAK_ROWS), (slow(2.0, 1), STREAK_ROWS)],
    ids=["waiting", "slow"],
)
GOOD = waiting(0.0, 1)


@BAD_ROWS
def test_shorter_streaks_are_not_reported(bad, first):
    assert findings_of((bad * (STREAK_ROWS - 1) + GOOD) * 20) == []


@BAD_ROWS
def test_reports_again_only_after_good_rows(bad, first):
    begin = bad * first
    short_pause = GOOD * (STREAK_ROWS - 1) + bad * STREAK_ROWS
    assert len(findings_of(begin + short_pause * 5)) == 1
    long_pause = GOOD * STREAK_ROWS + bad * STREAK_ROWS
    assert [number for number, _ in findings_of(begin + long_pause)] == [
        first,
        first + 2 * STREAK_ROWS,
    ]


def slow_in_turn(count):
    """Rows in which another rank is slow each time."""
    rows = []
    for number in range(count):
        compute_s = list(EQUAL_COMPUTE_S)
        compute_s[number % 4] = 2.0
        rows.append(([0.0] * 4, compute_s))
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(slow_in_turn(100), id="ranks in turn"),
        pytest.param([([0.0] * 4, [1.0, None, 5.0, 1.0])] * 50, id="unknown times"),
        pytest.param([([], [])] * 50, id="no ranks"),
        pytest.param([([0.0], [9.0])] * 50, id="single rank"),
    ],
)
def test_reports_no_straggler_without_one(rows):
    assert findings_of(rows) == []


@given(
    share=st.floats(0, STARVED_SHARE),
    ratios=st.lists(st.floats(1, STRAGGLER_RATIO - 1e-6), min_size=1, max_size=9),
)
def test_reports_nothing_within_the_thresholds(share, ratios):
    rows = [([share] * len(ratios), list(ratios))] * (3 * STREAK_ROWS)
    assert findings_of(rows) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_median_of_sorted_is_the_median(values):
    assert median_of_sorted(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("seed", range(5))
def test_scatter_is_robust_to_outliers(seed):
    rng = random.Random(seed)
    values = [rng.gauss(5, 2) for _ in range(2000)]
    centre, sigma = centre_and_scatter(sorted(values))
    assert centre == pytest.approx(5, abs=0.2)
    assert sigma == pytest.approx(2, rel=0.1)
    centre, sigma = centre_and_scatter(sorted(values + [1e9] * 600))
    assert centre < 7
    assert sigma < 4


@pytest.mark.parametrize("seed", range(5))
def test_level_follows_falling_values_only(seed):
    rng = random.Random(seed)
    falling = [10 - 0.05 * step + rng.gauss(0, 0.1) for step in range(128)]
    level, sigma = level_and_scatter(falling)
    assert level == pytest.approx(10 - 0.05 * 96, abs=0.2)
    assert sigma == pytest.approx(0.1, rel=0.4)
    centre, scatter = centre_and_scatter(sorted(falling))
    assert scatter > 1
    rising = falling[::-1]
    assert level_and_scatter(rising) == (centre, scatter)


@pytest.mark.parametrize("seed", range(5))
def test_error_of_median_ignores_slope(seed):
    rng = random.Random(seed)
    blocks = [rng.gauss(0, 1) for _ in range(400)]
    _, error = median_and_error(blocks)
    assert error == pytest.approx(1.2533 / math.sqrt(400), rel=0.2)
    _, sloped = median_and_error(
        [value + 0.05 * index for index, value in enumerate(blocks)]
    )
    assert sloped == pytest.approx(error, rel=0.1)


def test_median_of_one_block_has_no_error():
    assert median_and_error([2.5]) == (2.5, 0.0)
