"""Drift of a run's peak memory and MFU from its profile."""

from dataclasses import dataclass, replace

import pytest

from autotune.evidence.profile import Profile
from autotune.profiles.decide.drift import ALIKE_SHARE, Drift, drifts
from autotune.trials.values import FinishedTrial
from testbed.examples.profiles import example_profile as cpu_profile
from testbed.examples.tuning import example_inputs
from tests.autotune.advice.runs import run_of
from trainer.formats.run_record import Run

EXAMPLE_TRIALS = 320
"""Trials of the example: one for each micro-batch size from 1 to 320."""
EXAMPLE_MFU = 0.344
"""MFU that each step of the example's run logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuExample:
    """Run of the example on a GPU, with the profile and trials that it started from."""

    profile: Profile
    trials: tuple[FinishedTrial, ...]
    run: Run

    def drifts(self, **arguments) -> tuple[Drift, ...]:
        """Return the drifts of speed, MFU and memory."""
        return drifts(self.profile, self.run, trials=self.trials, **arguments)

    def memory_drift(self) -> Drift:
        """Return the drift of peak memory."""
        _, _, memory = self.drifts()
        return memory


@pytest.fixture(scope="module")
def gpu_example() -> GpuExample:
    """Return the run of the example, with all its trials."""
    profiles, runs = example_inputs(EXAMPLE_TRIALS)
    return GpuExample(
        profile=profiles[0].profile, trials=profiles[0].trials, run=runs[0].run
    )


def with_dense_head(finished: FinishedTrial) -> FinishedTrial:
    """Return a finished trial as if it had run with the dense MLM head."""
    config = finished.trial.measured["arguments"]["config"] | {"mlm_head": "dense"}
    trial = replace(finished.trial, measured={"arguments": {"config": config}})
    return replace(finished, trial=trial)


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
    run = replace(gpu_example.run, steps=(*steps, doubled))
    memory = replace(gpu_example, run=run).memory_drift()
    assert memory.verdict == "drift: more than in the trial"


def test_memory_of_another_recipe_is_not_expected(gpu_example):
    trials = tuple(with_dense_head(finished) for finished in gpu_example.trials)
    memory = replace(gpu_example, trials=trials).memory_drift()
    assert memory.expected is None
    assert memory.verdict == "no expected value"


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


def test_memory_on_a_cpu_is_not_comparable():
    _, _, memory = drifts(cpu_profile(), run_of([5.0] * 10))
    assert memory.verdict.startswith("not comparable on a CPU")


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
