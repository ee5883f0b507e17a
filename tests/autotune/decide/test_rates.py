import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.rates import (
    drifts,
    expected_rate,
    fill_share,
    run_rate,
    settled_steps,
    training_rates,
    tuned_rate,
    verdict_of,
)
from autotune.decide.statistics import of_one, of_steps, of_windows
from tests.autotune.decide.runs import TOKENS, noisy, run_of, that_trained_at, with_evidence
from tests.autotune.profiles import example_profile as small_profile
from tests.autotune.show.report.example import example_inputs


def test_what_comes_closest_to_training_is_taken():
    every = training_rates(with_evidence(probe=True, workers=True, baseline=True))
    assert [rate.read_from for rate in every] == ["training", "windows", "steps"]
    assert tuned_rate(with_evidence(probe=True, workers=True)).read_from == "windows"
    assert tuned_rate(with_evidence()) is None


def test_a_rate_of_slots_counts_what_holds_tokens():
    profile = with_evidence(probe=True)
    point = next(point for point in profile.evidence.probe.curve if point.rows == 64)
    rate = tuned_rate(profile)
    assert fill_share(profile) == pytest.approx(0.994)
    assert rate.value == pytest.approx(0.994 * point.slot_tokens_per_s)
    assert (rate.interval.low, rate.interval.high) == pytest.approx(
        (0.994 * point.slot_tokens_per_s_low, 0.994 * point.slot_tokens_per_s_high)
    )
    assert rate.interval.confidence == 0.95


def test_windows_are_those_of_the_profiles_own_workers_and_else_of_the_chosen_ones():
    profile = with_evidence(probe=True, workers=True)
    by_count = {row.loader_workers: row for row in profile.evidence.workers.rows}

    def with_workers(count):
        data = profile.train.data.model_copy(update={"loader_workers": count})
        return profile.model_copy(update={"train": profile.train.model_copy(update={"data": data})})

    for count, measured in ((2, 2), (4, 4), (7, 3)):
        windows = by_count[measured].slot_tokens_per_s
        middle = math.exp(sum(map(math.log, windows)) / len(windows))
        assert tuned_rate(with_workers(count)).value == pytest.approx(0.994 * middle)


def test_other_numbers_of_ranks_are_read_from_the_scaling_curve_with_the_bounds_of_the_links():
    profile = with_evidence(probe=True, network=True)
    assert expected_rate(profile, 2).read_from == "steps"
    measured, predicted = expected_rate(profile, 4), expected_rate(profile, 8)
    assert (measured.known, predicted.known) == ("measured", "predicted")
    assert (measured.interval.confidence, predicted.interval.confidence) == (0.98, 0.98)
    assert predicted.interval.low < predicted.value < predicted.interval.high
    own = predicted.estimate.interval()  # of 95 %, which is 1.960 standard deviations for 2.326
    assert math.log(own.high / own.low) == pytest.approx(
        math.log(predicted.interval.high / predicted.interval.low) * 1.960 / 2.326, 1e-3
    )
    assert expected_rate(profile, 5) is None


def test_the_first_steps_do_not_count_nor_do_earlier_starts():
    run = run_of([1.0] * 20 + [50.0] * 2 + [100.0] * 18, resumed_step=20)
    assert [row.step for row in settled_steps(run)] == list(range(23, 41))
    assert run_rate(run).value == pytest.approx(100.0)
    assert len(settled_steps(run_of([1.0] * 1000))) == 980


def test_a_rate_is_all_tokens_over_all_seconds():
    run = run_of([1.0] + [50.0, 200.0] * 5)
    settled = settled_steps(run)
    assert run_rate(run).value == pytest.approx(TOKENS * len(settled) / sum(row.step_s for row in settled))


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_the_interval_of_a_run_holds_its_true_rate_and_is_no_wider_than_its_noise_makes_it(memory):
    n, noise, runs = 250, 0.05, 80
    held, widths = 0, []
    for seed in range(runs):
        rate = run_rate(run_of(noisy(seed, n, memory=memory, noise=noise, mean=100.0)))
        held += rate.interval.low <= 100.0 <= rate.interval.high
        widths.append(math.log(rate.interval.high / rate.interval.low))
    assert held / runs >= 0.95 - 2.6 * math.sqrt(0.05 * 0.95 / runs)
    true_half = 1.96 * noise * math.sqrt((1 + memory) / (1 - memory) / (0.95 * n))
    assert true_half < sum(widths) / runs / 2 < 1.6 * true_half


@given(st.floats(0.01, 0.1), st.floats(1.5, 4), st.floats(1, 1e6))
def test_twice_the_noise_is_twice_the_interval_whatever_the_speed(noise, times, mean):
    def half(spread):
        pattern = [mean * math.exp(spread * (-1) ** (step * step // 3)) for step in range(200)]
        rate = run_rate(run_of(pattern))
        return math.log(rate.interval.high / rate.interval.low)

    assert half(times * noise) / half(noise) == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize(("steps", "bound"), [(50, pytest.approx(100.0)), (1, None)])
def test_a_run_without_noise_has_an_interval_without_width_and_a_short_one_has_none(steps, bound):
    rate = run_rate(run_of([100.0] * steps))
    assert (rate.value, rate.interval.low, rate.interval.high) == (pytest.approx(100.0), bound, bound)


@pytest.mark.parametrize("rates", [[], [math.nan] * 5])
def test_a_run_that_logged_no_figures_has_no_rate(rates):
    assert run_rate(run_of(rates)) is None


SPEED, NOISE, WINDOW_NOISE = 100.0, 0.05, 0.015
RUNS = 200
BY_CHANCE = 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / RUNS)
"""5 %, and what so many tries may be off by."""


def _verdicts(n, memory, *, reached=1.0):
    """Of runs that reach so much of what windows of training made people expect: shares that drifted, and unknown."""
    drifted = unknown = 0
    for seed in range(RUNS):
        windows = SPEED * np.exp(np.random.default_rng(10_000 + seed).normal(scale=WINDOW_NOISE, size=6))
        seconds = [1 / rate for rate in noisy(seed, n, memory=memory, noise=NOISE, mean=reached * SPEED)]
        verdict = verdict_of(of_windows(windows.tolist()), of_steps([1.0] * n, seconds))
        drifted += verdict.startswith("drift")
        unknown += verdict.startswith("noise is not known")
    return drifted / RUNS, unknown / RUNS


@pytest.mark.parametrize("n", [60, 250])
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.95])
def test_a_run_that_reaches_what_was_expected_is_hardly_ever_called_drift(n, memory):
    drifted, _ = _verdicts(n, memory)
    assert drifted <= BY_CHANCE


@pytest.mark.parametrize(("n", "memory"), [(60, 0.0), (120, 0.5), (400, 0.8), (60, 0.97)])
def test_a_tenth_slower_is_found_nearly_always_unless_the_run_is_too_short_for_how_slowly_it_varies(n, memory):
    drifted, unknown = _verdicts(n, memory, reached=0.9)
    is_short = memory > 0.9
    assert drifted < 0.3 if is_short else drifted >= 0.95
    assert unknown > 0.5 if is_short else unknown <= 0.05


def test_a_whole_run_is_judged_by_its_settled_steps():
    drifted = 0
    for seed in range(40):
        slow_start = [0.2 * SPEED] * 11  # of 111
        run = run_of([*slow_start, *noisy(seed, 100, memory=0.5, noise=NOISE, mean=SPEED)])
        windows = SPEED * np.exp(np.random.default_rng(seed).normal(scale=WINDOW_NOISE, size=6))
        drifted += drifts(that_trained_at(windows.tolist()), run)[0].verdict.startswith("drift")
    assert drifted <= 6  # of 40 that are as expected: 5 %, and what so many tries may be off by


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "as expected"), (0.9, "drift: slower, beyond noise"), (1.1, "drift: faster, beyond noise")],
)
def test_drift_is_named_where_noise_does_not_explain_it(factor, verdict):
    profile = with_evidence(probe=True, workers=True, baseline=True)
    rate = factor * tuned_rate(profile).value
    found = drifts(profile, run_of([rate * (1 + 0.001 * (step % 3)) for step in range(40)]))[0]
    assert found.verdict == verdict
    assert found.ratio.value == pytest.approx(factor, rel=0.002)
    assert found.ratio.low < found.ratio.value < found.ratio.high
    assert found.ratio.confidence == found.expected.confidence == found.achieved.confidence == 0.95


SURE = of_windows([100.0, 100.01, 99.99] * 5)


@pytest.mark.parametrize(
    ("expected", "achieved", "verdict"),
    [
        (SURE, of_windows([98.5, 98.51, 98.49] * 5), "as expected"),
        (SURE, of_windows([97.5, 97.51, 97.49] * 5), "drift: slower, beyond noise"),
        (of_one(100.0), of_one(95.0), "noise is not known: one figure shows no spread"),
        (of_one(100.0), of_one(50.0), "noise is not known: one figure shows no spread; 50% slower"),
    ],
)
def test_small_differences_concern_nobody_and_without_spread_only_what_is_far_is_told(expected, achieved, verdict):
    assert verdict_of(expected, achieved) == verdict


def test_expectations_of_the_links_are_told_with_their_own_confidence():
    profile = with_evidence(probe=True, network=True)
    found = drifts(profile, run_of(noisy(2, 200, memory=0.0, noise=0.01, mean=1e5), ranks=8))[0]
    assert (found.expected.confidence, found.ratio.confidence) == (0.98, 0.95)
    assert found.expected_source.startswith("predicted")


def test_memory_of_a_process_on_a_cpu_is_not_held_against_a_trial():
    assert drifts(small_profile(), run_of([5.0] * 10))[2].verdict.startswith("not comparable on a CPU")


class TestOnAGpu:
    def drifts(self, change=None, **arguments):
        (one, _), (reported,) = example_inputs(320)
        run = reported.run if change is None else change(reported.run)
        return drifts(one.profile, run, **{"trials": one.trials, "intact": one.intact} | arguments)

    def test_memory_is_held_against_the_trial_of_the_same_rows(self):
        memory = self.drifts()[2]
        assert memory.expected.value == pytest.approx(memory.achieved.value, rel=0.05)
        assert memory.verdict == "as expected"
        assert memory.ratio.low is None

    def test_memory_that_grew_is_drift(self):
        def grown(run):
            *steps, last = run.steps
            more = last.model_copy(update={"peak_memory_bytes": 2 * last.peak_memory_bytes})
            return replace(run, steps=(*steps, more))

        assert self.drifts(grown)[2].verdict == "drift: more than its trial took"

    def test_trials_of_another_recipe_say_nothing_of_the_memory(self):
        (one, _), _ = example_inputs(320)
        dense = [{"config": done.trial.measured["config"] | {"head": "dense"}} for done in one.trials]
        trials = [
            replace(done, trial=replace(done.trial, measured=measured))
            for done, measured in zip(one.trials, dense, strict=True)
        ]
        memory = self.drifts(trials=tuple(trials))[2]
        assert (memory.expected, memory.verdict) == (None, "nothing to hold it against")

    def test_mfu_is_expected_from_the_rate(self):
        speed, mfu, _ = self.drifts()
        assert mfu.ratio == speed.ratio
        assert mfu.verdict == speed.verdict
        assert mfu.expected.value / mfu.achieved.value == pytest.approx(speed.expected.value / speed.achieved.value)
        assert mfu.achieved.value == pytest.approx(0.344, rel=0.01)

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ({"otherwise": ("layout", "precision")}, "trained otherwise (layout, precision)"),
            ({"intact": False}, "the profile was edited"),
        ],
    )
    def test_what_was_trained_otherwise_or_edited_since_is_no_drift(self, arguments, why):
        assert {drift.verdict for drift in self.drifts(**arguments)} == {f"not comparable: {why}"}


def test_a_run_of_no_profile_or_without_steps_is_held_against_nothing():
    assert drifts(None, run_of([5.0] * 10)) == ()
    assert drifts(small_profile(), run_of([])) == ()


def test_ranks_of_which_nothing_is_known_are_held_against_nothing():
    found = drifts(with_evidence(probe=True), run_of([5.0] * 10, ranks=7))[0]
    assert (found.expected, found.ratio, found.verdict) == (None, None, "nothing to hold it against")
    assert found.expected_source == "nothing known of 7 ranks"
