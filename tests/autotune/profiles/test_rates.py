import math
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


def test_what_comes_closest_to_training_is_taken_and_a_rate_of_slots_counts_what_holds_tokens():
    every = training_rates(add_evidence(probe=True, workers=True, baseline=True))
    assert [rate.read_from for rate in every] == ["training", "windows", "steps"]
    assert every[0] == tuned_rate(add_evidence(probe=True, workers=True, baseline=True))
    assert tuned_rate(add_evidence()) is None
    profile = add_evidence(probe=True)
    point = next(
        point for point in profile.evidence.probe.curve if point.micro_batch_size == 64
    )
    found = tuned_rate(profile).interval
    padded = (
        point.padded_tokens_per_s,
        point.padded_tokens_per_s_low,
        point.padded_tokens_per_s_high,
    )
    assert [found.value, found.low, found.high] == pytest.approx(
        [0.994 * rate for rate in padded]
    )
    assert found.confidence == 0.95


@pytest.mark.parametrize(("count", "measured"), [(2, 2), (4, 4), (7, 3)])
def test_windows_are_those_of_the_profiles_own_workers_and_else_of_the_chosen_ones(
    count, measured
):
    profile = add_evidence(probe=True, workers=True)
    (row,) = (
        row for row in profile.evidence.workers.rows if row.num_workers == measured
    )
    data = profile.train.data.model_copy(update={"num_workers": count})
    middle = math.exp(
        sum(map(math.log, row.padded_tokens_per_s)) / len(row.padded_tokens_per_s)
    )
    assert tuned_rate(but(profile, train={"data": data})).value == pytest.approx(
        0.994 * middle
    )


def test_other_numbers_of_ranks_are_read_from_the_scaling_curve_with_the_bounds_of_the_links():
    profile = add_evidence(probe=True, network=True)
    assert expected_rate(profile, 2).read_from == "steps"
    measured, predicted = expected_rate(profile, 4), expected_rate(profile, 8)
    assert (measured.known, predicted.known) == ("measured", "predicted")
    low, high = predicted.interval.low, predicted.interval.high
    assert low < predicted.value < high
    # Of 95 %, which is 1.960 standard deviations for 2.326.
    own = predicted.estimate.interval()
    assert math.log(own.high / own.low) == pytest.approx(
        math.log(high / low) * 1.960 / 2.326, 1e-3
    )
    assert expected_rate(profile, 5) is None
    found = drifts(
        profile, run_of(noisy(2, 200, memory=0.0, noise=0.01, mean=1e5), ranks=8)
    )[0]
    assert (
        measured.interval.confidence,
        found.expected.confidence,
        found.ratio.confidence,
    ) == (0.98, 0.98, 0.95)
    assert found.expected_source.startswith("predicted")


def test_a_rate_is_all_tokens_over_all_seconds_without_the_first_steps_and_earlier_starts():
    run = run_of([1.0] * 20 + [50.0] * 2 + [100.0, 25.0] * 9, resumed_step=20)
    assert [row.step for row in settled_steps(run)] == list(range(23, 41))
    assert run_rate(run).value == pytest.approx(2 / (1 / 100 + 1 / 25))
    assert len(settled_steps(run_of([1.0] * 1000))) == 980


@pytest.mark.parametrize(("steps", "bound"), [(50, pytest.approx(100.0)), (1, None)])
def test_a_run_without_noise_has_an_interval_without_width_a_short_one_has_none_and_none_no_rate(
    steps, bound
):
    found = run_rate(run_of([100.0] * steps)).interval
    assert (found.value, found.low, found.high) == (pytest.approx(100.0), bound, bound)
    assert run_rate(run_of([])) is run_rate(run_of([math.nan] * 5)) is None


SPEED, NOISE, WINDOW_NOISE, RUNS = 100.0, 0.05, 0.015, 200
SAME = [(n, memory, 1.0) for n in (60, 250) for memory in (0.0, 0.5, 0.8, 0.95)]


@pytest.mark.parametrize(
    ("n", "memory", "reached"),
    [*SAME, (60, 0.0, 0.9), (120, 0.5, 0.9), (400, 0.8, 0.9), (60, 0.97, 0.9)],
)
def test_a_tenth_slower_is_drift_and_the_same_speed_is_not_unless_a_run_is_too_short_for_how_slowly_it_varies(
    n, memory, reached
):
    said = []
    for seed in range(RUNS):
        windows = SPEED * np.exp(
            np.random.default_rng(10_000 + seed).normal(scale=WINDOW_NOISE, size=6)
        )
        seconds = [
            1 / rate
            for rate in noisy(seed, n, memory=memory, noise=NOISE, mean=reached * SPEED)
        ]
        said.append(
            verdict_of(
                estimate_windows(windows.tolist()), estimate_steps([1.0] * n, seconds)
            )
        )
    drifted, unknown = (
        sum(one.startswith(word) for one in said) / RUNS
        for word in ("drift", "noise unknown")
    )
    if reached == 1:
        # 5 %, and what so many tries may be off by.
        assert drifted <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / RUNS)
    elif memory > 0.9:
        assert drifted < 0.3
        assert unknown > 0.5
    else:
        assert drifted >= 0.95
        assert unknown <= 0.05


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "as expected"),
        (0.9, "drift: slower, beyond noise"),
        (1.1, "drift: faster, beyond noise"),
    ],
)
def test_drift_of_settled_steps_is_named_where_noise_does_not_explain_it(
    factor, verdict
):
    profile = add_evidence(probe=True, workers=True, baseline=True)
    rate = factor * tuned_rate(profile).value
    found = drifts(
        profile,
        run_of(
            [0.2 * rate] * 2 + [rate * (1 + 0.001 * (step % 3)) for step in range(38)]
        ),
    )[0]
    assert (found.verdict, found.ratio.value) == (
        verdict,
        pytest.approx(factor, rel=0.002),
    )
    assert found.ratio.low < found.ratio.value < found.ratio.high
    assert (
        found.ratio.confidence
        == found.expected.confidence
        == found.achieved.confidence
        == 0.95
    )


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
def test_small_differences_concern_nobody_and_without_spread_only_what_is_far_is_told(
    expected, achieved, verdict
):
    assert verdict_of(expected, achieved) == verdict


def gpu_drifts(change=lambda run: run, **arguments):
    (one, _), (reported,) = example_inputs(320)
    return drifts(
        one.profile,
        change(reported.run),
        **{"trials": one.trials, "intact": one.intact} | arguments,
    )


def test_memory_is_held_against_the_trial_of_the_same_rows_and_recipe():
    memory = gpu_drifts()[2]
    assert memory.expected.value == pytest.approx(memory.achieved.value, rel=0.05)
    assert (memory.verdict, memory.ratio.low) == ("as expected", None)

    def grown(run):
        *steps, last = run.steps
        return replace(
            run,
            steps=(
                *steps,
                last.model_copy(
                    update={"peak_memory_bytes": 2 * last.peak_memory_bytes}
                ),
            ),
        )

    assert gpu_drifts(grown)[2].verdict == "drift: more than in the trial"

    def dense(done):
        measured = {"config": done.trial.measured["config"] | {"mlm_head": "dense"}}
        return replace(done, trial=replace(done.trial, measured=measured))

    memory = gpu_drifts(trials=tuple(map(dense, example_inputs(320)[0][0].trials)))[2]
    assert (memory.expected, memory.verdict) == (None, "no expected value")
    assert drifts(small_profile(), run_of([5.0] * 10))[2].verdict.startswith(
        "not comparable on a CPU"
    )


def test_mfu_is_expected_from_the_rate_and_what_was_trained_otherwise_or_edited_since_is_no_drift():
    speed, mfu, _ = gpu_drifts()
    assert (mfu.ratio, mfu.verdict) == (speed.ratio, speed.verdict)
    assert mfu.expected.value / mfu.achieved.value == pytest.approx(
        speed.expected.value / speed.achieved.value
    )
    assert mfu.achieved.value == pytest.approx(0.344, rel=0.01)
    for arguments, why in (
        (
            {"other_settings": ("layout", "precision")},
            "trained with other settings (layout, precision)",
        ),
        ({"intact": False}, "the profile was modified"),
    ):
        assert {drift.verdict for drift in gpu_drifts(**arguments)} == {
            f"not comparable: {why}"
        }


def test_what_has_no_profile_or_no_steps_or_ranks_of_which_nothing_is_known_is_held_against_nothing():
    assert drifts(None, run_of([5.0] * 10)) == drifts(small_profile(), run_of([])) == ()
    found = drifts(add_evidence(probe=True), run_of([5.0] * 10, ranks=7))[0]
    assert (found.expected, found.ratio, found.verdict) == (
        None,
        None,
        "no expected value",
    )
    assert found.expected_source == "no rate is known for 7 ranks"
