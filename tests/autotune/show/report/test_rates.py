from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.evidence import Evidence
from autotune.show.report.rates import achieved_rate, drifts, expected_rate, later_steps, tuned_rate
from benchmarks.example_report import example_inputs, example_profile
from tests.autotune.profiles import example_profile as small_profile
from tests.autotune.show.report.examples import reported, reported_run
from tests.trainer.rows import row_of

PATH = Path("profiles/m.toml")


def with_evidence(**parts):
    profile = example_profile("d")
    kept = {name: getattr(profile.evidence, name) for name, wanted in parts.items() if wanted}
    return reported(str(PATH), profile.model_copy(update={"evidence": Evidence(**kept)}))


def test_what_comes_closest_to_training_is_taken():
    assert "training" in tuned_rate(with_evidence(probe=True, workers=True, baseline=True)).source
    assert "worker sweep" in tuned_rate(with_evidence(probe=True, workers=True)).source
    assert "full rows" in tuned_rate(with_evidence(probe=True)).source
    assert tuned_rate(with_evidence()) is None


def test_a_rate_of_slots_counts_what_holds_tokens():
    one = with_evidence(probe=True)
    point = next(point for point in one.profile.evidence.probe.curve if point.rows == 64)
    rate = tuned_rate(one)
    assert rate.value == pytest.approx(0.994 * point.slot_tokens_per_s)
    assert rate.low < rate.value < rate.high


def test_other_numbers_of_ranks_are_read_from_the_scaling_curve():
    one = with_evidence(probe=True, network=True)
    assert expected_rate(one, 2).source.startswith("steps on full rows")
    assert (expected_rate(one, 4).known, expected_rate(one, 8).known) == ("measured", "predicted")
    assert expected_rate(one, 5) is None


def steps_of(speed, count=40, first=0):
    return tuple(
        row_of(step, real_tokens_per_s=speed * (1 + 0.001 * (step % 3))) for step in range(first, first + count)
    )


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "as expected"), (0.9, "drift: slower, beyond noise"), (1.1, "drift: faster, beyond noise")],
)
def test_drift_is_named_where_noise_does_not_explain_it(factor, verdict):
    one = with_evidence(probe=True, workers=True, baseline=True)
    run = reported_run(steps=steps_of(factor * tuned_rate(one).value), profile_path=PATH)
    assert drifts(one, run)[0].verdict == verdict


def test_without_repetition_noise_is_not_known():
    one = with_evidence(probe=True, workers=True, baseline=True)
    run = reported_run(steps=steps_of(0.5 * tuned_rate(one).value, count=1), profile_path=PATH)
    assert drifts(one, run)[0].verdict == "not repeated, so the noise is not known, and 50% slower"


def test_memory_of_a_process_on_a_cpu_is_not_held_against_a_trial():
    run = reported_run(steps=steps_of(5.0), profile_path=PATH)
    assert drifts(reported(str(PATH)), run)[2].verdict.startswith("not comparable on a CPU")


def test_memory_on_a_gpu_is_held_against_the_trial_of_the_same_rows():
    (one, _), (run,) = example_inputs(320)
    memory = drifts(one, run)[2]
    assert memory.expected == pytest.approx(memory.achieved, rel=0.05)
    assert memory.verdict == "as expected"


def test_a_run_of_no_profile_or_without_steps_is_held_against_nothing():
    assert drifts(None, reported_run()) == ()
    assert drifts(reported(profile=small_profile()), reported_run(steps=())) == ()


def test_the_spread_of_a_run_is_that_of_its_stretches():
    rate = achieved_rate(steps_of(100.0), 2)
    assert rate.low <= rate.value <= rate.high
    assert rate.value == pytest.approx(100.1, rel=0.01)


class TestWhatIsNotComparable:
    def test_a_run_that_was_trained_otherwise_is_no_drift(self):
        one = with_evidence(probe=True, workers=True, baseline=True)
        run = replace(reported_run(steps=steps_of(1.0), profile_path=PATH), otherwise=("layout", "precision"))
        assert {drift.verdict for drift in drifts(one, run)} == {
            "not comparable: trained otherwise (layout, precision)"
        }

    def test_nor_is_one_of_a_profile_that_was_edited_since(self):
        one = replace(with_evidence(probe=True, workers=True, baseline=True), intact=False)
        run = reported_run(steps=steps_of(1.0), profile_path=PATH)
        assert {drift.verdict for drift in drifts(one, run)} == {"not comparable: the profile was edited"}

    def test_trials_of_another_recipe_say_nothing_of_the_memory(self):
        (one, _), (run,) = example_inputs(320)
        trials = []
        for done in one.trials:
            config = done.trial.measured.get("config")
            measured = done.trial.measured if config is None else {"config": config | {"head": "dense"}}
            trials.append(replace(done, trial=replace(done.trial, measured=measured)))
        memory = drifts(replace(one, trials=tuple(trials)), run)[2]
        assert memory.expected is None
        assert memory.verdict == "nothing to hold it against"

    def test_earlier_starts_do_not_count(self):
        run = reported_run(steps=(*steps_of(1.0, count=20, first=1), *steps_of(100.0, count=20, first=21)))
        header = run.run.header.model_copy(update={"resumed_step": 20})
        later = later_steps(replace(run, run=replace(run.run, header=header)))
        assert [row.step for row in later] == list(range(22, 41))


def test_mfu_is_expected_from_the_rate():
    (one, _), (run,) = example_inputs(320)
    speed, mfu, _ = drifts(one, run)
    assert mfu.expected is not None
    assert mfu.ratio == pytest.approx(speed.ratio, rel=0.02)
    assert mfu.verdict == speed.verdict
