import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.evidence.confirm import DeliveredTraining
from autotune.profiles.decide.trial_log_check import check_trial_log
from autotune.trials.trial_log import trial_log_sha256
from autotune.trials.values import TrialRecord
from testbed.examples.kernels import near_bounds, with_kernels
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import example_records, record

EXAMPLE = example_records()
"""Trials that gave all the figures of the example profile."""
EXAMPLE_PROBE = example_profile().evidence.probe
EXAMPLE_WORKERS = example_profile().evidence.workers
STEP_INDEX = 2
"""Position in ``EXAMPLE`` of the trial that gave the curve at micro-batch size 1."""
STEP = EXAMPLE[STEP_INDEX]
LATER = record(time_utc="2026-01-02T00:00:00+00:00")
"""Trial of the example profile, a day later."""
OTHER = record(site="there", dataset_hash="e")
"""Trial of another dataset."""
indices = st.integers(0, len(EXAMPLE) - 1)
"""Positions in ``EXAMPLE``."""


def resting_on(records, **changes):
    """Return the example profile with the hash and time of these trials.

    Args:
        records: Trials that the profile's hash covers.
        changes: Other fields of its provenance.
    """
    provenance = {
        "trial_log_sha256": trial_log_sha256(records),
        "trial_log_until_utc": max(trial.time_utc for trial in records),
    }
    return but(example_profile(), provenance=provenance | changes)


def with_probe(profile, **figures):
    """Return the profile with other figures of its probe."""
    probe = profile.evidence.probe.model_copy(update=figures)
    return but(profile, evidence={"probe": probe})


def with_figures(trial, figures):
    """Return a measured trial with other figures."""
    outcome = {"kind": "measured", "figures": trial.outcome["figures"] | figures}
    return trial.model_copy(update={"outcome": outcome})


def with_replaced(index, *replacements):
    """Return the trials of the example, with others in place of one."""
    return (*EXAMPLE[:index], *replacements, *EXAMPLE[index + 1 :])


@given(st.permutations(EXAMPLE))
def test_hash_does_not_depend_on_order(records):
    assert trial_log_sha256(records) == trial_log_sha256(EXAMPLE)


@given(indices)
def test_lost_trial_differs(index):
    records = with_replaced(index)
    assert check_trial_log(resting_on(EXAMPLE), records).found == "differs"


@given(indices)
def test_changed_trial_differs(index):
    changed = EXAMPLE[index].model_copy(update={"seconds": 2.0})
    records = with_replaced(index, changed)
    assert check_trial_log(resting_on(EXAMPLE), records).found == "differs"


@given(indices)
def test_repeated_trial_differs(index):
    records = with_replaced(index, EXAMPLE[index], EXAMPLE[index])
    assert check_trial_log(resting_on(EXAMPLE), records).found == "differs"


def test_later_trials_change_nothing():
    check = check_trial_log(resting_on(EXAMPLE), (*EXAMPLE, OTHER, LATER))
    assert check.found == "same"
    assert check.trials == len(EXAMPLE)
    assert check.added == 1
    assert check.others == 1
    assert check.unfounded == ()


def test_profile_without_time_is_not_recomputable():
    check = check_trial_log(resting_on(EXAMPLE, trial_log_until_utc=None), EXAMPLE)
    assert check.found == "not recomputable"
    assert check.unfounded == ()


@pytest.mark.parametrize("records", [(), (OTHER,)], ids=["none", "another profile's"])
def test_trial_log_without_own_trials_says_nothing(records):
    check = check_trial_log(resting_on(EXAMPLE), records)
    assert check.found == "no trials"
    assert check.trials == 0
    assert check.others == len(records)
    assert check.unfounded == ()


@pytest.mark.parametrize(
    ("figures", "unfounded"),
    [
        pytest.param(
            {"feasible_max": 64},
            "evidence.probe.feasible_max = 64 with its peak",
            id="largest size",
        ),
        pytest.param(
            {"feasible_peak_bytes": 1},
            "evidence.probe.feasible_max = 2 with its peak",
            id="its peak",
        ),
        pytest.param(
            {"infeasible_min": 65},
            "evidence.probe.infeasible_min = 65",
            id="out of memory",
        ),
    ],
)
def test_names_unfounded_memory_figure(figures, unfounded):
    profile = with_probe(resting_on(EXAMPLE), **figures)
    check = check_trial_log(profile, EXAMPLE)
    assert check.found == "same"
    assert check.unfounded == (unfounded,)


def test_names_rate_of_curve_without_trial():
    # Size 2 was measured at 900 tokens/s.
    point = EXAMPLE_PROBE.curve[1].model_copy(update={"units_per_s": 901.0})
    profile = with_probe(resting_on(EXAMPLE), curve=[point])
    assert check_trial_log(profile, EXAMPLE).unfounded == (
        "evidence.probe.curve at micro-batch size 2",
    )


def test_names_rates_of_sweep_without_trial():
    # Windows were measured at 99, 100, 101 and 102 tokens/s.
    row = EXAMPLE_WORKERS.rows[1].model_copy(update={"units_per_s": [99.0, 500.0]})
    workers = EXAMPLE_WORKERS.model_copy(
        update={"rows": [row], "cached_units_per_s": [103.0]}
    )
    edited = but(resting_on(EXAMPLE), evidence={"workers": workers})
    assert check_trial_log(edited, EXAMPLE).unfounded == (
        "evidence.workers.cached_units_per_s",
        "evidence.workers.rows of 1",
    )


def confirmed_example():
    """Return the example with rates of windows and a training that are in the log.

    Also its trials: windows of 99 to 102 padded tokens/s, and a training of 50.
    """
    figures = {"tokens_per_s": 50.0, "steps": 10, "seconds": 20.0, "mfu": None}
    training = record(
        "short_training", {"kind": "measured", "figures": figures}, key="training"
    )
    records = (*EXAMPLE, training)
    profile = but(resting_on(records), train={"global_batch_size": 3})
    # 3 sequences in 2 micro-batches of 2, of 33.5 tokens in 512.
    factor = 3 / 4 * 33.5 / 512
    confirm = with_kernels(profile, near_bounds()).evidence.confirm
    row = confirm.rows[0].model_copy(
        update={
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "tokens_per_s": [99.0 * factor, 101.0 * factor],
        }
    )
    delivered = DeliveredTraining(tokens_per_s=50.0, steps=10, seconds=20.0)
    confirm = confirm.model_copy(
        update={"rows": [row], "delivered": delivered, "not_delivered": None}
    )
    return but(profile, evidence={"confirm": confirm}), records


def test_confirmed_rates_match_their_trials():
    profile, records = confirmed_example()
    assert check_trial_log(profile, records).unfounded == ()


def test_names_confirmed_rates_without_trial():
    profile, records = confirmed_example()
    confirm = profile.evidence.confirm
    row = confirm.rows[0].model_copy(update={"tokens_per_s": [50.0]})
    delivered = confirm.delivered.model_copy(update={"tokens_per_s": 51.0})
    edited = confirm.model_copy(update={"rows": [row], "delivered": delivered})
    profile = but(profile, evidence={"confirm": edited})
    assert check_trial_log(profile, records).unfounded == (
        "evidence.confirm.rows of micro-batch size 2",
        "evidence.confirm.delivered",
    )


@pytest.mark.parametrize(
    "figures",
    [{"step_s": ["x"]}, {"units_per_step": "x"}, {"peak_bytes": []}],
    ids=["times", "tokens", "peak"],
)
def test_record_with_hostile_figures_is_no_trial(figures):
    assert TrialRecord.of(STEP.model_dump(mode="json")) == STEP
    hostile = with_figures(STEP, figures).model_dump(mode="json")
    assert TrialRecord.of(hostile) is None


@pytest.mark.parametrize("step_s", [[], [0]], ids=["no steps", "no time"])
def test_step_without_time_gives_no_rate(step_s):
    records = with_replaced(STEP_INDEX, with_figures(STEP, {"step_s": step_s}))
    unfounded = check_trial_log(resting_on(EXAMPLE), records).unfounded
    assert unfounded == ("evidence.probe.curve at micro-batch size 1",)
