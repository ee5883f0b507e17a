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
from trainer.health.monitor import (
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


def test_a_row_holds_the_interval_since_the_last(rig):
    training, meter, batches = rig
    tokens = 0
    for _ in range(2):
        taken = meter.take(batches, 2)
        tokens += sum(batch.non_padding_tokens for batch in taken)
        meter.add(taken, training.step.run(taken, 1e-3, measure_partial=True))
    row = _close(meter)
    assert (row.non_padding_tokens, row.padded_tokens) == (round(tokens / 2), 8 * 64)
    assert row.packing_efficiency == pytest.approx(tokens / (2 * 8 * 64))
    assert row.tokens_per_s == pytest.approx(tokens / (2 * row.step_s))
    assert row.tokens_per_s_per_rank == row.tokens_per_s
    assert 0 < row.compute_s + row.optimizer_s + row.data_wait_s <= row.step_s
    assert (row.communication_s, row.mfu) == (
        0,
        pytest.approx(row.model_flops_per_s_per_rank / 1e12),
    )
    assert row.mfu_6n == pytest.approx(
        6 * training.work.parameters * row.tokens_per_s / 1e12
    )
    assert row.peak_memory_bytes > 2**27
    assert (row.head_overflows, row.recompilations, row.skipped_steps) == (3, 2, 4)
    assert (row.slowest_rank, row.slowest_rank_ratio) == (None, None)
    assert row.loss == pytest.approx(math.log(128), rel=0.1)
    again = meter.take(batches, 2)
    meter.add(again, training.step.run(again, 1e-3))
    assert _close(meter, step=2).non_padding_tokens == sum(
        batch.non_padding_tokens for batch in again
    )


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, -math.inf)],
)
def test_numbers_that_are_none_and_a_share_of_no_known_peak_are_missing_from_the_row(
    rig, loss, norm
):
    _, meter, batches = rig
    meter._peak_flops_per_s = None
    meter.add(meter.take(batches, 1), result_of(loss, norm, computed_s=1.0))
    row = _close(meter)
    assert row.loss == (loss if math.isfinite(loss) else None)
    assert (row.grad_norm, row.mfu, row.mfu_6n) == (
        norm if math.isfinite(norm) else None,
        None,
        None,
    )
    assert row.model_flops_per_s_per_rank > 0


def test_a_step_that_is_not_finite_leaves_the_noise_scale_as_it_was(rig):
    training, meter, batches = rig
    taken = meter.take(batches, 2)
    meter.add(taken, training.step.run(taken, 1e-3, measure_partial=True))
    _close(meter)
    before = meter.noise.parts
    assert before != [0.0, 0.0]
    meter.add(
        taken,
        result_of(
            math.nan,
            math.nan,
            partial=PartialGradient(square=torch.tensor(math.nan), share=0.5),
        ),
    )
    _close(meter, step=2)
    assert meter.noise.parts == before


@dataclass(frozen=True, kw_only=True, slots=True)
class _ThreeRanks(Ranks):
    """The first of three; the others compute, and wait for their loaders, for a
    multiple of its time."""

    times: tuple[float, ...] = (1.0, 1.5, 1.0)
    waits: tuple[float, ...] = (0.0, 0.0, 0.0)

    def all_reduce_async(self, tensor):
        own = float(tensor[5])
        if own:
            tensor[5:11] = torch.tensor(
                [own * time for time in self.times] + list(self.waits),
                dtype=tensor.dtype,
            )
        tensor[13] = 2 * tensor[11]  # the last one's memory
        return lambda: None


@pytest.fixture
def rows_of(rig):
    """A function that gives the meter of such ranks, and the rows of so many steps."""
    training, _, batches = rig
    batch = next(batches)

    def make(count=3, departed_s=0.5, **others):
        first = {"rank": 0, "local_rank": 0, "local_world_size": 3, "world_size": 3}
        meter, rows = (
            Meter(
                training.work,
                _ThreeRanks(**first, device=torch.device("cpu"), **others),
            ),
            [],
        )
        for step in range(1, count + 1):
            meter.add([batch], result_of(computed_s=1.0, departed_s=departed_s))
            rows.append(_close(meter, step))
        return meter, rows

    return make


def test_the_slowest_rank_of_the_interval_before_is_named_if_it_is_known_when_gradients_left(
    rows_of,
):
    _, (first, second, third) = rows_of()
    assert (first.slowest_rank, first.slowest_rank_ratio) == (None, None)
    assert (second.slowest_rank, third.slowest_rank) == (1, 1)
    assert second.slowest_rank_ratio == pytest.approx(1.5)
    assert (second.compute_s, second.communication_s) == (0.5, 0.5)
    assert second.peak_memory_bytes > 2**28
    _, rows = rows_of(departed_s=None)
    assert [
        (row.slowest_rank, row.slowest_rank_ratio, row.communication_s) for row in rows
    ] == [(None, None, None)] * 3


@pytest.mark.parametrize("departed_s", [0.5, None])
def test_the_longest_wait_for_a_loader_of_the_interval_before_is_told_with_its_rank(
    rows_of, departed_s
):
    _, rows = rows_of(waits=(0.0, 2.0, 3.0), departed_s=departed_s)
    assert [(row.longest_data_wait_s, row.longest_data_wait_rank) for row in rows] == [
        (None, None),
        (3.0, 2),
        (3.0, 2),
    ]


@pytest.mark.parametrize(
    ("others", "kind", "rank"),
    [
        ({}, Kind.STRAGGLER, 1.0),
        ({"times": (1.0, 1.0, 1.0), "waits": (0.0, 0.0, 1e9)}, Kind.STARVED, 2.0),
    ],
)
def test_a_rank_that_stays_slow_or_waits_for_its_loader_is_found_and_findings_are_taken_once(
    rows_of, others, kind, rank
):
    meter, _ = rows_of(12, **others)
    (found,) = meter.take_diagnoses()
    assert (found.kind, found.values["rank"]) == (kind, rank)
    assert meter.take_diagnoses() == []


def test_rows_of_steps_that_are_undone_are_left_out(rig):
    _, meter, batches = rig
    taken = meter.take(batches, 2)
    meter.add(taken, result_of())
    meter.close(
        1, learning_rate=0.1, head_overflows=0, recompilations=0, skipped_steps=0
    )
    meter.add(taken, result_of())
    meter.discard()
    assert (list(meter.rows(wait_for_all=True)), meter.open_steps) == ([], 0)
    meter.add(taken, result_of())
    assert _close(meter).step == 1


def test_the_noise_scale_of_made_up_gradients_is_found_again_once_the_signal_is_seen():
    """Gradients of single tokens with a known mean and variance; parts and wholes are
    their means."""
    random = np.random.default_rng(0)
    signal = random.normal(size=50)
    noise, tokens, parts = 30.0, 400, 8
    truth = 50 * noise**2 / float(signal @ signal)
    scale, hidden = NoiseScale(), NoiseScale()
    assert scale.tokens is None
    for _ in range(300):
        part_means = signal + noise * random.normal(size=(parts, 50)) / np.sqrt(
            tokens / parts
        )
        whole = part_means.mean(axis=0)
        scale.update(
            float(whole @ whole),
            float(np.square(part_means).sum(axis=1).mean()),
            1 / parts,
            tokens,
        )
    # Smoothing looks back ten steps, so single figures scatter.
    assert scale.tokens == pytest.approx(truth, rel=0.6)
    hidden.update(1.0, 10.0, 0.5, 100)
    assert hidden.tokens is None


FINE = [1.0, 1.0, 1.0, 1.0]


def told(rows):
    """Number, counted from 1, and kind of what is said of rows of (waits, compute)."""
    pace = PaceMonitor()
    found = (
        pace.check(step_s=1.0, data_wait_s=waits, compute_s=compute)
        for waits, compute in rows
    )
    return [
        (number, one.kind)
        for number, of_row in enumerate(found, start=1)
        for one in of_row
    ]


def waiting(share, rows):
    return [([0.0, share, 0.0, 0.0], FINE)] * rows


def slow(ratio, rows):
    return [([0.0] * 4, [1.0, 1.0, ratio, 1.0])] * rows


@pytest.mark.parametrize(
    ("rows", "found"),
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
def test_a_loader_that_starves_a_rank_is_said_once_and_not_of_the_first_rows(
    rows, found
):
    assert told(rows) == found


def test_ranks_are_named_with_their_host_where_it_is_known_their_figures_and_what_to_do():
    pace, found = PaceMonitor(hosts=("n1", "n1", "n2")), []
    for _ in range(2 * STREAK_ROWS):
        found += pace.check(
            step_s=2.0,
            data_wait_s=[0.0, 0.1, 0.5, 0.0, 0.0],
            compute_s=[1.0, 1.0, 1.0, 2.0, 3.0],
        )
    assert [(one.kind, one.action) for one in found] == [
        (Kind.STRAGGLER, Action.WARN),
        (Kind.STARVED, Action.WARN),
    ]
    slow, starved = found
    assert slow.values == {"rank": 4.0, "ratio": 3.0, "compute_s": 3.0, "median_s": 1.0}
    assert re.search(r"rank 4 takes 3\.00 times.*also slow: 3", slow.message)
    assert "nvidia-smi -q -d PERFORMANCE" in slow.next_step
    assert any("heat" in cause for cause in slow.event(1).causes)
    assert starved.values == {
        "rank": 2.0,
        "share": 0.25,
        "data_wait_s": 0.5,
        "step_s": 2.0,
    }
    assert "rank 2 (n2) waits for data 25% of the time" in starved.message
    for said in (
        "autotune workers PROFILE",
        "train.data.num_workers",
        "train.data.stage_to",
    ):
        assert said in starved.next_step


@pytest.mark.parametrize(
    ("bad", "first"), [(waiting(0.5, 1), 2 * STREAK_ROWS), (slow(2.0, 1), STREAK_ROWS)]
)
def test_single_bad_rows_are_no_matter_and_it_is_said_again_only_after_a_time_of_calm(
    bad, first
):
    calm = waiting(0.0, 1)
    assert told((bad * (STREAK_ROWS - 1) + calm) * 20) == []
    begin = bad * first
    assert len(told(begin + (calm * (STREAK_ROWS - 1) + bad * STREAK_ROWS) * 5)) == 1
    assert [
        number for number, _ in told(begin + calm * STREAK_ROWS + bad * STREAK_ROWS)
    ] == [
        first,
        first + 2 * STREAK_ROWS,
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [
            ([0.0] * 4, [2.0 if rank == row % 4 else 1.0 for rank in range(4)])
            for row in range(100)
        ],
        [([0.0] * 4, [1.0, None, 5.0, 1.0])] * 50,
        [([], [])] * 50,
        [([0.0], [9.0])] * 50,
    ],
    ids=["ranks in turn", "unknown times", "no ranks", "a rank alone"],
)
def test_nothing_is_said_of_stragglers_where_none_can_be_told(rows):
    assert told(rows) == []


@given(
    share=st.floats(0, STARVED_SHARE),
    ratios=st.lists(st.floats(1, STRAGGLER_RATIO - 1e-6), min_size=1, max_size=9),
)
def test_what_stays_within_the_bounds_is_never_said(share, ratios):
    assert told([([share] * len(ratios), list(ratios))] * (3 * STREAK_ROWS)) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_middle_is_the_median(values):
    assert median_of_sorted(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("seed", range(5))
def test_scatter_is_the_standard_deviation_of_normal_values_whatever_a_third_of_them_is(
    seed,
):
    rng = random.Random(seed)
    values = [rng.gauss(5, 2) for _ in range(2000)]
    centre, sigma = centre_and_scatter(sorted(values))
    assert centre == pytest.approx(5, abs=0.2)
    assert sigma == pytest.approx(2, rel=0.1)
    centre, sigma = centre_and_scatter(sorted(values + [1e9] * 600))
    assert centre < 7
    assert sigma < 4


@pytest.mark.parametrize("seed", range(5))
def test_what_falls_is_where_it_is_now_and_scatters_around_its_way_and_what_rises_is_held_against_all_of_it(
    seed,
):
    rng = random.Random(seed)
    falling = [10 - 0.05 * step + rng.gauss(0, 0.1) for step in range(128)]
    level, sigma = level_and_scatter(falling)
    assert level == pytest.approx(10 - 0.05 * 96, abs=0.2)
    assert sigma == pytest.approx(0.1, rel=0.4)
    assert centre_and_scatter(sorted(falling))[1] > 1
    assert level_and_scatter(falling[::-1]) == centre_and_scatter(sorted(falling))


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_a_median_is_that_of_repeated_draws_and_a_slope_adds_nothing(seed):
    rng = random.Random(seed)
    blocks = [rng.gauss(0, 1) for _ in range(400)]
    _, error = median_and_error(blocks)
    assert error == pytest.approx(1.2533 / math.sqrt(400), rel=0.2)
    _, sloped = median_and_error(
        [value + 0.05 * place for place, value in enumerate(blocks)]
    )
    assert sloped == pytest.approx(error, rel=0.1)
    assert median_and_error([2.5]) == (2.5, 0.0)  # of one block none can be told
