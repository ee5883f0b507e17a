import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.profiles.decide.trial_log_check import (
    check_trial_log,
    compare_fingerprints,
)
from autotune.trials.trial_log import own_records, trial_log_sha256
from autotune.trials.values import TrialRecord
from testbed.examples.profiles import FINGERPRINT, but, example_profile
from testbed.examples.trials import example_records, record

EXAMPLE = example_records()


def _resting_on(records, **changes):
    said = {
        "trial_log_sha256": trial_log_sha256(records),
        "trial_log_until_utc": max(one.time_utc for one in records),
    }
    return but(example_profile(), provenance=said | changes)


def _with_probe(profile, **figures):
    return but(
        profile, evidence={"probe": profile.evidence.probe.model_copy(update=figures)}
    )


MINE, OLD = record(), record("step", old=True)
OF_GPU = FINGERPRINT.model_copy(update={"device": "cuda", "gpu_name": "H100"})
KNOWN_OLD = record(old=True, config={"data": {"dataset_hash": "d"}})
SHORT, LONG = (record(config={"seq_length_tokens": tokens}) for tokens in (128, 512))
UNSAID = record("links", outcome={"kind": "crashed", "detail": ""})


@pytest.mark.parametrize(
    ("mine", "others", "of", "seq_length_tokens"),
    [
        *(
            ([MINE], [record(site="there", **where)], FINGERPRINT, None)
            for where in (
                {"model_sha256": "other"},
                {"dataset_hash": "other"},
                {"cpu_model": "Another"},
                {"gpu_name": "H100"},
            )
        ),
        (
            [MINE, record(site="there", torch="2.14.0"), record(allotted_cpus=1)],
            [],
            FINGERPRINT,
            None,
        ),
        # Sequences of another length are another tuning.
        ([LONG, UNSAID], [SHORT], FINGERPRINT, 512),
        ([LONG, SHORT, UNSAID], [], FINGERPRINT, None),
        # A GPU's steps may be replayed on a processor.
        (
            [record(gpu_name="H100", gpu_count=2), record(site="cpu", cpu_model="Any")],
            [],
            OF_GPU,
            None,
        ),
        ([], [record(gpu_name="A100")], OF_GPU, None),
        # Old trials are known by their settings, and those without any by their
        # neighbours.
        (
            [KNOWN_OLD, OLD],
            [
                record(old=True, site="there", config={"data": {"dataset_hash": "e"}}),
                record("step", old=True, site="there"),
                record(
                    old=True,
                    site="elsewhere",
                    config={"model": {"name": "tiny", "config": {}}},
                ),
            ],
            FINGERPRINT,
            None,
        ),
    ],
)
def test_trials_of_this_model_dataset_and_device_are_the_profiles(
    mine, others, of, seq_length_tokens
):
    assert own_records([*mine, *others], of, seq_length_tokens) == tuple(mine)


@given(
    st.permutations(EXAMPLE),
    st.integers(0, len(EXAMPLE) - 1),
    st.sampled_from(["lost", "changed", "twice"]),
)
def test_a_trial_that_was_lost_changed_or_put_in_shows_and_the_order_does_not(
    records, index, how
):
    assert trial_log_sha256(records) == trial_log_sha256(EXAMPLE)
    one = EXAMPLE[index]
    instead = {
        "lost": (),
        "changed": (one.model_copy(update={"seconds": 2.0}),),
        "twice": (one, one),
    }[how]
    assert (
        check_trial_log(
            _resting_on(EXAMPLE), (*EXAMPLE[:index], *instead, *EXAMPLE[index + 1 :])
        ).found
        == "differs"
    )


def test_trials_of_later_and_of_others_change_nothing_and_alone_say_nothing():
    later, other = (
        record(time_utc="2026-01-02T00:00:00+00:00"),
        record(site="there", dataset_hash="e"),
    )
    found = check_trial_log(_resting_on(EXAMPLE), (*EXAMPLE, other, later))
    assert (found.found, found.trials, found.added, found.others) == (
        "same",
        len(EXAMPLE),
        1,
        1,
    )
    assert found.unfounded == ()
    unknown = check_trial_log(_resting_on(EXAMPLE, trial_log_until_utc=None), EXAMPLE)
    assert (unknown.found, unknown.unfounded) == ("not recomputable", ())
    for records in ((), (other,)):
        found = check_trial_log(_resting_on(EXAMPLE), records)
        assert (found.found, found.trials, found.others, found.unfounded) == (
            "no trials",
            0,
            len(records),
            (),
        )


def test_a_figure_that_no_trial_gave_is_named_whatever_hash_the_profile_has():
    profile = _resting_on(EXAMPLE)
    for figures, named in (
        ({"feasible_max": 64}, "evidence.probe.feasible_max = 64 with its peak"),
        ({"feasible_peak_bytes": 1}, "evidence.probe.feasible_max = 2 with its peak"),
        ({"infeasible_min": 65}, "evidence.probe.infeasible_min = 65"),
    ):
        found = check_trial_log(_with_probe(profile, **figures), EXAMPLE)
        assert (found.found, found.unfounded) == ("same", (named,))
    curve = [
        point.model_copy(update={"padded_tokens_per_s": 901.0})
        for point in profile.evidence.probe.curve[1:]
    ]
    workers = profile.evidence.workers
    rows = [
        row.model_copy(update={"padded_tokens_per_s": [99.0, 500.0]})
        for row in workers.rows[1:]
    ]
    workers = workers.model_copy(
        update={"rows": rows, "cached_padded_tokens_per_s": [103.0]}
    )
    edited = but(_with_probe(profile, curve=curve), evidence={"workers": workers})
    assert check_trial_log(edited, EXAMPLE).unfounded == (
        "evidence.probe.curve at micro-batch size 2",
        "evidence.workers.cached_padded_tokens_per_s",
        "evidence.workers.rows of 1",
    )


def _with_figures(index, figures):
    outcome = {
        "kind": "measured",
        "figures": EXAMPLE[index].outcome["figures"] | figures,
    }
    return EXAMPLE[index].model_copy(update={"outcome": outcome})


def test_a_record_with_hostile_figures_is_no_trial_and_hostile_speeds_are_no_figures():
    for figures in (
        {"step_s": ["x"]},
        {"padded_tokens_per_step": "x"},
        {"peak_bytes": []},
    ):
        assert TrialRecord.of(_with_figures(2, figures).model_dump(mode="json")) is None
    assert TrialRecord.of(EXAMPLE[2].model_dump(mode="json")) == EXAMPLE[2]
    for step_s in ([], [0]):
        hostile = (*EXAMPLE[:2], _with_figures(2, {"step_s": step_s}), *EXAMPLE[3:])
        unfounded = check_trial_log(_resting_on(EXAMPLE), hostile).unfounded
        assert unfounded == ("evidence.probe.curve at micro-batch size 1",)


CARD = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})


@pytest.mark.parametrize(
    ("change", "severity", "replayed"),
    [
        ({}, None, None),
        ({"dataset_hash": "other"}, "error", "error"),
        ({"model_sha256": "other"}, "error", "error"),
        ({"torch": "2.14.0"}, "warning", "warning"),
        ({"python": "3.12.0"}, "info", "info"),
        ({"gpu_total_bytes": 99}, "error", None),  # less memory, and more
        ({"gpu_total_bytes": 101}, "info", None),
        # Where a step is replayed the GPU does not matter; CPU and disk must be the
        # same.
        ({"device": "cuda"}, "error", None),
        ({"cpu_model": "Another CPU"}, "warning", "error"),
        ({"data_filesystem": "lustre"}, "warning", "error"),
    ],
)
def test_a_difference_weighs_what_it_does_to_the_figures(change, severity, replayed):
    other = CARD.model_copy(update=change)
    assert [check.found for check in compare_fingerprints(CARD, other)] == [
        severity
    ] * (severity is not None)
    assert [
        check.found for check in compare_fingerprints(CARD, other, replayed=True)
    ] == [replayed] * (replayed is not None)


@pytest.mark.parametrize(
    ("replayed", "worst"), [(False, "dataset_hash"), (True, "cpu_model")]
)
def test_the_worst_comes_first_and_where_a_step_is_replayed_nothing_of_a_gpu_matters(
    replayed, worst
):
    gpu_model = {
        "gpu_name": "NVIDIA H200",
        "gpu_count": 8,
        "gpu_total_bytes": 2**37,
        "gpu_mig": False,
        "gpu_power_cap_w": 700.0,
        "driver": "580.1",
        "cuda": "13.0",
        "device": "cuda",
    }
    assert (
        compare_fingerprints(
            FINGERPRINT.model_copy(update=gpu_model), FINGERPRINT, replayed=True
        )
        == ()
    )
    other = FINGERPRINT.model_copy(update={"python": "3.12", "torch": "9", worst: "x"})
    assert [
        check.field
        for check in compare_fingerprints(FINGERPRINT, other, replayed=replayed)
    ] == [worst, "torch", "python"]
