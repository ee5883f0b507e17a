import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from autotune.base.statistics import estimate_single, estimate_steps, estimate_windows
from autotune.profiles.decide.rates import (
    drifts,
    expected_rate,
    run_rate,
    settled_steps,
    training_rates,
    tuned_rate,
    verdict_of,
)
from testbed.examples.profiles import but
from testbed.examples.profiles import example_profile as small_profile
from testbed.examples.tuning import example_inputs
from tests.autotune.advice.runs import add_evidence, noisy, run_of

NON_PADDING_SHARE = 0.994
"""Share of non-padding tokens in the profiles of ``add_evidence``."""


def test_rate_closest_to_training_comes_first():
    profile = add_evidence(probe=True, workers=True, baseline=True)
    rates = training_rates(profile)
    assert [rate.read_from for rate in rates] == ["training", "windows", "steps"]
    assert tuned_rate(profile) == rates[0]


def test_profile_without_evidence_has_no_rate():
    assert tuned_rate(add_evidence()) is None


def test_rate_of_probe_counts_non_padding_tokens():
    profile = add_evidence(probe=True)
    (point,) = (
        point for point in profile.evidence.probe.curve if point.micro_batch_size == 64
    )
    interval = tuned_rate(profile).interval
    assert [interval.value, interval.low, interval.high] == pytest.approx(
        [
            NON_PADDING_SHARE * point.padded_tokens_per_s,
            NON_PADDING_SHARE * point.padded_tokens_per_s_low,
            NON_PADDING_SHARE * point.padded_tokens_per_s_high,
        ]
    )
    assert interval.confidence == 0.95


@pytest.mark.parametrize(
    ("num_workers", "measured"),
    [(2, 2), (4, 4), pytest.param(7, 3, id="not measured: the chosen")],
)
def test_rate_of_workers_is_of_the_profiles_count(num_workers, measured):
    profile = add_evidence(probe=True, workers=True)
    (row,) = (
        row for row in profile.evidence.workers.rows if row.num_workers == measured
    )
    data = profile.train.data.model_copy(update={"num_workers": num_workers})
    rate = tuned_rate(but(profile, train={"data": data}))
    mean = statistics.geometric_mean(row.padded_tokens_per_s)
    assert rate.value == pytest.approx(NON_PADDING_SHARE * mean)


def test_rate_of_other_ranks_is_of_scaling_curve():
    profile = add_evidence(probe=True, network=True)
    assert expected_rate(profile, 2).read_from == "steps"
    assert expected_rate(profile, 4).known == "measured"
    assert expected_rate(profile, 8).known == "predicted"
    assert expected_rate(profile, 5) is None


def test_predicted_rate_has_the_bounds_of_its_prediction():
    predicted = expected_rate(add_evidence(probe=True, network=True), 8)
    low, high = predicted.interval.low, predicted.interval.high
    assert low < predicted.value < high
    # Of 95 %, which is 1.960 standard deviations for 2.326.
    own = predicted.estimate.interval()
    assert math.log(own.high / own.low) == pytest.approx(
        math.log(high / low) * 1.960 / 2.326, 1e-3
    )


def test_drift_from_a_prediction_has_its_confidence():
    profile = add_evidence(probe=True, network=True)
    assert expected_rate(profile, 4).interval.confidence == 0.98
    rates = noisy(2, 200, memory=0.0, noise=0.01, mean=1e5)
    speed, _, _ = drifts(profile, run_of(rates, ranks=8))
    assert speed.expected.confidence == 0.98
    assert speed.ratio.confidence == 0.95
    assert speed.expected_source.startswith("predicted")


def test_rate_of_a_run_leaves_out_warm_up():
    run = run_of([1.0] * 20 + [50.0] * 2 + [100.0, 25.0] * 9, resumed_step=20)
    assert [row.step for row in settled_steps(run)] == list(range(23, 41))
    # All tokens over all seconds.
    assert run_rate(run).value == pytest.approx(2 / (1 / 100 + 1 / 25))


def test_warm_up_is_limited():
    assert len(settled_steps(run_of([1.0] * 1000))) == 980


@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        pytest.param(50, pytest.approx(100.0), id="without noise"),
        pytest.param(1, None, id="too short"),
    ],
)
def test_bounds_of_a_runs_rate(steps, bound):
    interval = run_rate(run_of([100.0] * steps)).interval
    assert interval.value == pytest.approx(100.0)
    assert interval.low == bound
    assert interval.high == bound


@pytest.mark.parametrize("rates", [[], [math.nan] * 5])
def test_run_without_figures_has_no_rate(rates):
    assert run_rate(run_of(rates)) is None


SPEED = 100.0
NOISE = 0.05
WINDOW_NOISE = 0.015
RUNS = 200


def verdicts_of_runs(steps: int, memory: float, share: float) -> list[str]:
    """Return the verdicts on runs with a share of the expected speed.

    Args:
        steps: Steps of each run.
        memory: Autocorrelation of neighbouring steps.
        share: Share of the expected speed that the runs reach.
    """
    verdicts = []
    for seed in range(RUNS):
        rng = np.random.default_rng(10_000 + seed)
        windows = SPEED * np.exp(rng.normal(scale=WINDOW_NOISE, size=6))
        rates = noisy(seed, steps, memory=memory, noise=NOISE, mean=share * SPEED)
        seconds = [1 / rate for rate in rates]
        verdicts.append(
            verdict_of(
                estimate_windows(windows.tolist()),
                estimate_steps([1.0] * steps, seconds),
            )
        )
    return verdicts


def share_of(verdicts: list[str], start: str) -> float:
    return sum(verdict.startswith(start) for verdict in verdicts) / len(verdicts)


@pytest.mark.parametrize("steps", [60, 250])
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.95])
def test_same_speed_is_no_drift(steps, memory):
    drifted = share_of(verdicts_of_runs(steps, memory, 1.0), "drift")
    # 5 %, and what so many tries may be off by.
    assert drifted <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / RUNS)


@pytest.mark.parametrize(("steps", "memory"), [(60, 0.0), (120, 0.5), (400, 0.8)])
def test_a_tenth_slower_is_drift(steps, memory):
    verdicts = verdicts_of_runs(steps, memory, 0.9)
    assert share_of(verdicts, "drift") >= 0.95
    assert share_of(verdicts, "noise unknown") <= 0.05


def test_run_too_short_for_its_variation_is_undecided():
    verdicts = verdicts_of_runs(60, 0.97, 0.9)
    assert share_of(verdicts, "drift") < 0.3
    assert share_of(verdicts, "noise unknown") > 0.5


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "as expected"),
        (0.9, "drift: slower, beyond noise"),
        (1.1, "drift: faster, beyond noise"),
    ],
)
def test_drift_beyond_noise_is_named(factor, verdict):
    profile = add_evidence(probe=True, workers=True, baseline=True)
    rate = factor * tuned_rate(profile).value
    warm_up = [0.2 * rate] * 2
    settled = [rate * (1 + 0.001 * (step % 3)) for step in range(38)]
    speed, _, _ = drifts(profile, run_of(warm_up + settled))
    assert speed.verdict == verdict
    assert speed.ratio.value == pytest.approx(factor, rel=0.002)
    assert speed.ratio.low < speed.ratio.value < speed.ratio.high
    for interval in (speed.ratio, speed.expected, speed.achieved):
        assert interval.confidence == 0.95


SURE = estimate_windows([100.0, 100.01, 99.99] * 5)


@pytest.mark.parametrize(
    ("expected", "achieved", "verdict"),
    [
        (SURE, estimate_windows([98.5, 98.51, 98.49] * 5), "as expected"),
        (
            SURE,
            estimate_windows([97.5, 97.51, 97.49] * 5),
            "drift: slower, beyond noise",
        ),
        (
            estimate_single(100.0),
            estimate_single(95.0),
            "noise unknown: one figure shows no spread",
        ),
        (
            estimate_single(100.0),
            estimate_single(50.0),
            "noise unknown: one figure shows no spread; 50% slower",
        ),
    ],
)
def test_verdict_on_a_difference(expected, achieved, verdict):
    assert verdict_of(expected, achieved) == verdict


def gpu_drifts(change=lambda run: run, **arguments):
    """Return the drifts of the example's run on a GPU, with a change to the run."""
    (profile, _), (reported,) = example_inputs(320)
    defaults = {"trials": profile.trials, "intact": profile.intact}
    return drifts(profile.profile, change(reported.run), **defaults | arguments)


def test_memory_is_compared_with_the_same_trial():
    _, _, memory = gpu_drifts()
    assert memory.expected.value == pytest.approx(memory.achieved.value, rel=0.05)
    assert memory.verdict == "as expected"
    assert memory.ratio.low is None


def test_more_memory_is_drift():
    def grow(run):
        *steps, last = run.steps
        grown_bytes = 2 * last.peak_memory_bytes
        grown = last.model_copy(update={"peak_memory_bytes": grown_bytes})
        return replace(run, steps=(*steps, grown))

    _, _, memory = gpu_drifts(grow)
    assert memory.verdict == "drift: more than in the trial"


def test_memory_of_another_recipe_is_not_expected():
    def dense(finished):
        config = finished.trial.measured["config"] | {"mlm_head": "dense"}
        trial = replace(finished.trial, measured={"config": config})
        return replace(finished, trial=trial)

    (profile, _), _ = example_inputs(320)
    _, _, memory = gpu_drifts(trials=tuple(map(dense, profile.trials)))
    assert memory.expected is None
    assert memory.verdict == "no expected value"


def test_memory_on_a_cpu_is_not_comparable():
    _, _, memory = drifts(small_profile(), run_of([5.0] * 10))
    assert memory.verdict.startswith("not comparable on a CPU")


def test_mfu_is_expected_from_the_rate():
    speed, mfu, _ = gpu_drifts()
    assert mfu.ratio == speed.ratio
    assert mfu.verdict == speed.verdict
    assert mfu.expected.value / mfu.achieved.value == pytest.approx(
        speed.expected.value / speed.achieved.value
    )
    assert mfu.achieved.value == pytest.approx(0.344, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"other_settings": ("layout", "precision")},
            "trained with other settings (layout, precision)",
        ),
        ({"intact": False}, "the profile was modified"),
    ],
    ids=["other settings", "edited profile"],
)
def test_other_training_is_not_comparable(arguments, reason):
    verdicts = {drift.verdict for drift in gpu_drifts(**arguments)}
    assert verdicts == {f"not comparable: {reason}"}


def test_no_drift_without_profile_or_steps():
    assert drifts(None, run_of([5.0] * 10)) == ()
    assert drifts(small_profile(), run_of([])) == ()


def test_unknown_ranks_have_no_expected_rate():
    speed, _, _ = drifts(add_evidence(probe=True), run_of([5.0] * 10, ranks=7))
    assert speed.expected is None
    assert speed.ratio is None
    assert speed.verdict == "no expected value"
    assert speed.expected_source == "no rate is known for 7 ranks"
