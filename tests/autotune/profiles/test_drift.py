"""Drift of a run from its profile: speed, memory and MFU."""

from dataclasses import replace

import pytest

from autotune.profiles.decide.drift import ALIKE_SHARE, Drift, drifts
from autotune.profiles.decide.rates import Rate, tuned_rate
from autotune.profiles.values import Profile
from autotune.trials.values import FinishedTrial
from testbed.examples.profiles import example_profile as cpu_profile
from testbed.examples.tuning import example_inputs
from tests.autotune.advice.runs import add_evidence, noisy, run_of
from trainer.record.run_record import Run

EXAMPLE_TRIALS = 320
"""Trials of the example: one for each micro-batch size from 1 to 320."""
EXAMPLE_MFU = 0.344
"""MFU that each step of the example's run logs."""


def speed_drift(profile: Profile, run: Run, **arguments) -> Drift:
    """Return the drift of non-padding tokens/s."""
    speed, _, _ = drifts(profile, run, **arguments)
    return speed


@pytest.fixture
def tuned_profile() -> Profile:
    """Return a profile with a probe, a worker sweep and a baseline."""
    return add_evidence(probe=True, workers=True, baseline=True)


@pytest.fixture
def scaled_profile() -> Profile:
    """Return a profile with a probe of 2 ranks and a scaling curve."""
    return add_evidence(probe=True, network=True)


def run_with_factor(expected: Rate, factor: float) -> Run:
    """Return a run with hardly any noise at a factor of the expected rate."""
    rate = factor * expected.value
    # Two slow steps of warm-up: of 40 steps, the first 4 do not count.
    warm_up = [0.2 * rate] * 2
    settled = [rate * (1 + 0.001 * (step % 3)) for step in range(38)]
    return run_of(warm_up + settled)


class GpuExample:
    """Run of the example on a GPU, with the profile and trials that it started from."""

    def __init__(self) -> None:
        profiles, runs = example_inputs(EXAMPLE_TRIALS)
        self.profile = profiles[0].profile
        self.trials: tuple[FinishedTrial, ...] = profiles[0].trials
        self.run = runs[0].run

    def drifts(self, **arguments) -> tuple[Drift, ...]:
        """Return the drifts of speed, MFU and memory."""
        return drifts(self.profile, self.run, trials=self.trials, **arguments)

    def memory_drift(self) -> Drift:
        """Return the drift of peak memory."""
        _, _, memory = self.drifts()
        return memory


@pytest.fixture
def gpu_example() -> GpuExample:
    return GpuExample()


def with_dense_head(finished: FinishedTrial) -> FinishedTrial:
    """Return a finished trial as if it had run with the dense MLM head."""
    config = finished.trial.measured["config"] | {"mlm_head": "dense"}
    trial = replace(finished.trial, measured={"config": config})
    return replace(finished, trial=trial)


# Drift of the rate.


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "as expected"),
        (0.9, "drift: slower, beyond noise"),
        (1.1, "drift: faster, beyond noise"),
    ],
)
def test_drift_beyond_noise_is_named(tuned_profile, factor, verdict):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    assert speed.verdict == verdict
    # Settled steps are up to 0.2 % faster than the factor.
    assert speed.ratio.value == pytest.approx(factor, rel=0.002)
    assert speed.ratio.low < speed.ratio.value < speed.ratio.high


@pytest.mark.parametrize("factor", [1.0, 0.9, 1.1])
def test_drift_is_shown_with_95_percent_bounds(tuned_profile, factor):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    for interval in (speed.ratio, speed.expected, speed.achieved):
        assert interval.confidence == 0.95


def test_drift_from_a_prediction_has_its_confidence(scaled_profile):
    rates = noisy(2, 200, autocorrelation=0.0, noise=0.01, mean=1e5)
    speed = speed_drift(scaled_profile, run_of(rates, ranks=8))
    assert speed.expected.confidence == 0.98
    assert speed.ratio.confidence == 0.95
    assert speed.expected_source.startswith("predicted")


def test_unknown_ranks_have_no_expected_rate():
    speed = speed_drift(add_evidence(probe=True), run_of([5.0] * 10, ranks=7))
    assert speed.expected is None
    assert speed.ratio is None
    assert speed.verdict == "no expected value"
    assert speed.expected_source == "no rate is known for 7 ranks"


# Drift of a run on a GPU, with its memory and MFU.


def test_memory_is_compared_with_the_same_trial(gpu_example):
    memory = gpu_example.memory_drift()
    assert memory.expected.value == pytest.approx(
        memory.achieved.value, rel=ALIKE_SHARE
    )
    assert memory.verdict == "as expected"
    assert memory.ratio.low is None


def test_more_memory_is_drift(gpu_example):
    *steps, last = gpu_example.run.steps
    doubled = last.model_copy(update={"peak_memory_bytes": 2 * last.peak_memory_bytes})
    gpu_example.run = replace(gpu_example.run, steps=(*steps, doubled))
    assert gpu_example.memory_drift().verdict == "drift: more than in the trial"


def test_memory_of_another_recipe_is_not_expected(gpu_example):
    gpu_example.trials = tuple(
        with_dense_head(finished) for finished in gpu_example.trials
    )
    memory = gpu_example.memory_drift()
    assert memory.expected is None
    assert memory.verdict == "no expected value"


def test_memory_on_a_cpu_is_not_comparable():
    _, _, memory = drifts(cpu_profile(), run_of([5.0] * 10))
    assert memory.verdict.startswith("not comparable on a CPU")


def test_mfu_drifts_like_the_rate(gpu_example):
    speed, mfu, _ = gpu_example.drifts()
    assert mfu.ratio == speed.ratio
    assert mfu.verdict == speed.verdict
    assert mfu.expected.value / mfu.achieved.value == pytest.approx(
        speed.expected.value / speed.achieved.value
    )


def test_achieved_mfu_is_the_logged_one(gpu_example):
    _, mfu, _ = gpu_example.drifts()
    # It is computed from the rate, which varies by 0.4 % between the steps.
    assert mfu.achieved.value == pytest.approx(EXAMPLE_MFU, rel=0.004)


# Runs without a comparison.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            {"other_settings": ("layout", "precision")},
            "trained with other settings (layout, precision)",
            id="other settings",
        ),
        pytest.param(
            {"intact": False}, "the profile was modified", id="edited profile"
        ),
    ],
)
def test_other_training_is_not_comparable(gpu_example, arguments, reason):
    verdicts = {drift.verdict for drift in gpu_example.drifts(**arguments)}
    assert verdicts == {f"not comparable: {reason}"}


def test_run_without_profile_has_no_drift():
    assert drifts(None, run_of([5.0] * 10)) == ()


def test_run_without_steps_has_no_drift():
    assert drifts(cpu_profile(), run_of([])) == ()
