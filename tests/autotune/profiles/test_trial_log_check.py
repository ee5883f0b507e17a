import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from autotune.profiles.decide.trial_log_check import check_trial_log
from autotune.trials.trial_log import own_records, trial_log_sha256
from autotune.trials.values import TrialRecord
from testbed.examples.profiles import FINGERPRINT, but, example_profile
from testbed.examples.trials import example_records, record

EXAMPLE = example_records()


def resting_on(records, **changes):
    """Return the example profile with the hash and time of these trials."""
    provenance = {
        "trial_log_sha256": trial_log_sha256(records),
        "trial_log_until_utc": max(record.time_utc for record in records),
    }
    return but(example_profile(), provenance=provenance | changes)


def with_probe(profile, **figures):
    probe = profile.evidence.probe.model_copy(update=figures)
    return but(profile, evidence={"probe": probe})


OWN = record()
OLD = record("step", old=True)
OF_GPU = FINGERPRINT.model_copy(update={"device": "cuda", "gpu_name": "H100"})
KNOWN_OLD = record(old=True, config={"data": {"dataset_hash": "d"}})
SHORT = record(config={"seq_length_tokens": 128})
LONG = record(config={"seq_length_tokens": 512})
WITHOUT_LENGTH = record("links", outcome={"kind": "crashed", "detail": ""})


@pytest.mark.parametrize(
    "fingerprint",
    [
        {"model_sha256": "other"},
        {"dataset_hash": "other"},
        {"cpu_model": "Another"},
        {"gpu_name": "H100"},
    ],
    ids=["model", "dataset", "CPU", "GPU"],
)
def test_trials_with_another_fingerprint_are_not_own(fingerprint):
    other = record(site="there", **fingerprint)
    assert own_records([OWN, other], FINGERPRINT, None) == (OWN,)


def test_other_software_or_cpu_share_is_own():
    records = (OWN, record(site="there", torch="2.14.0"), record(allotted_cpus=1))
    assert own_records(records, FINGERPRINT, None) == records


def test_sequences_of_another_length_are_not_own():
    records = [LONG, WITHOUT_LENGTH, SHORT]
    assert own_records(records, FINGERPRINT, 512) == (LONG, WITHOUT_LENGTH)


def test_every_length_is_own_to_a_profile_without():
    records = (LONG, SHORT, WITHOUT_LENGTH)
    assert own_records(records, FINGERPRINT, None) == records


def test_gpu_steps_replayed_on_a_cpu_are_own():
    on_gpu = record(gpu_name="H100", gpu_count=2)
    replayed = record(site="cpu", cpu_model="Any")
    assert own_records([on_gpu, replayed], OF_GPU, None) == (on_gpu, replayed)


def test_trials_of_another_gpu_are_not_own():
    assert own_records([record(gpu_name="A100")], OF_GPU, None) == ()


def test_old_trials_are_known_by_settings_or_neighbours():
    other_dataset = {"data": {"dataset_hash": "e"}}
    other_model = {"model": {"name": "tiny", "config": {}}}
    others = [
        record(old=True, site="there", config=other_dataset),
        # Without settings, beside a trial of another dataset.
        record("step", old=True, site="there"),
        record(old=True, site="elsewhere", config=other_model),
    ]
    records = [KNOWN_OLD, OLD, *others]
    assert own_records(records, FINGERPRINT, None) == (KNOWN_OLD, OLD)


@given(st.permutations(EXAMPLE))
def test_hash_does_not_depend_on_order(records):
    assert trial_log_sha256(records) == trial_log_sha256(EXAMPLE)


@given(st.integers(0, len(EXAMPLE) - 1), st.sampled_from(["lost", "changed", "twice"]))
def test_changed_trial_log_differs(index, change):
    trial = EXAMPLE[index]
    instead = {
        "lost": (),
        "changed": (trial.model_copy(update={"seconds": 2.0}),),
        "twice": (trial, trial),
    }[change]
    records = (*EXAMPLE[:index], *instead, *EXAMPLE[index + 1 :])
    assert check_trial_log(resting_on(EXAMPLE), records).found == "differs"


LATER = record(time_utc="2026-01-02T00:00:00+00:00")
OTHER = record(site="there", dataset_hash="e")


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
        ({"feasible_max": 64}, "evidence.probe.feasible_max = 64 with its peak"),
        ({"feasible_peak_bytes": 1}, "evidence.probe.feasible_max = 2 with its peak"),
        ({"infeasible_min": 65}, "evidence.probe.infeasible_min = 65"),
    ],
)
def test_names_unfounded_memory_figure(figures, unfounded):
    profile = with_probe(resting_on(EXAMPLE), **figures)
    check = check_trial_log(profile, EXAMPLE)
    assert check.found == "same"
    assert check.unfounded == (unfounded,)


def test_names_unfounded_rates():
    profile = resting_on(EXAMPLE)
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
    edited = but(with_probe(profile, curve=curve), evidence={"workers": workers})
    assert check_trial_log(edited, EXAMPLE).unfounded == (
        "evidence.probe.curve at micro-batch size 2",
        "evidence.workers.cached_padded_tokens_per_s",
        "evidence.workers.rows of 1",
    )


def with_figures(record, figures):
    outcome = {"kind": "measured", "figures": record.outcome["figures"] | figures}
    return record.model_copy(update={"outcome": outcome})


STEP = EXAMPLE[2]


@pytest.mark.parametrize(
    "figures",
    [{"step_s": ["x"]}, {"padded_tokens_per_step": "x"}, {"peak_bytes": []}],
)
def test_record_with_hostile_figures_is_no_trial(figures):
    assert TrialRecord.of(STEP.model_dump(mode="json")) == STEP
    hostile = with_figures(STEP, figures).model_dump(mode="json")
    assert TrialRecord.of(hostile) is None


@pytest.mark.parametrize("step_s", [[], [0]])
def test_step_without_time_gives_no_rate(step_s):
    records = (*EXAMPLE[:2], with_figures(STEP, {"step_s": step_s}), *EXAMPLE[3:])
    unfounded = check_trial_log(resting_on(EXAMPLE), records).unfounded
    assert unfounded == ("evidence.probe.curve at micro-batch size 1",)


def found_by(comparison):
    return [check.found for check in comparison]


ON_GPU = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        pytest.param({"dataset_hash": "other"}, "error", id="dataset"),
        pytest.param({"model_sha256": "other"}, "error", id="model"),
        pytest.param({"torch": "2.14.0"}, "warning", id="torch"),
        pytest.param({"python": "3.12.0"}, "info", id="python"),
        pytest.param({"gpu_total_bytes": 99}, "error", id="less GPU memory"),
        pytest.param({"gpu_total_bytes": 101}, "info", id="more GPU memory"),
        pytest.param({"device": "cuda"}, "error", id="device"),
        pytest.param({"cpu_model": "Another CPU"}, "warning", id="CPU"),
        pytest.param({"data_filesystem": "lustre"}, "warning", id="file system"),
    ],
)
def test_severity_of_a_difference(change, severity):
    other = ON_GPU.model_copy(update=change)
    assert found_by(compare_fingerprints(ON_GPU, other)) == [severity]


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        pytest.param({"dataset_hash": "other"}, "error", id="dataset"),
        pytest.param({"model_sha256": "other"}, "error", id="model"),
        pytest.param({"torch": "2.14.0"}, "warning", id="torch"),
        pytest.param({"python": "3.12.0"}, "info", id="python"),
        pytest.param({"cpu_model": "Another CPU"}, "error", id="CPU"),
        pytest.param({"data_filesystem": "lustre"}, "error", id="file system"),
    ],
)
def test_severity_of_a_difference_to_a_replay(change, severity):
    other = ON_GPU.model_copy(update=change)
    assert found_by(compare_fingerprints(ON_GPU, other, replayed=True)) == [severity]


@pytest.mark.parametrize(
    "change",
    [{"gpu_total_bytes": 99}, {"gpu_total_bytes": 101}, {"device": "cuda"}],
    ids=["less GPU memory", "more GPU memory", "device"],
)
def test_replay_ignores_differences_of_the_gpu(change):
    other = ON_GPU.model_copy(update=change)
    assert compare_fingerprints(ON_GPU, other, replayed=True) == ()


@pytest.mark.parametrize("replayed", [False, True])
def test_equal_fingerprints_have_no_differences(replayed):
    assert compare_fingerprints(ON_GPU, ON_GPU.model_copy(), replayed=replayed) == ()


def test_gpu_does_not_matter_to_a_replayed_step():
    gpu_fields = {
        "gpu_name": "NVIDIA H200",
        "gpu_count": 8,
        "gpu_total_bytes": 2**37,
        "gpu_mig": False,
        "gpu_power_cap_w": 700.0,
        "driver": "580.1",
        "cuda": "13.0",
        "device": "cuda",
    }
    profile = FINGERPRINT.model_copy(update=gpu_fields)
    assert compare_fingerprints(profile, FINGERPRINT, replayed=True) == ()


@pytest.mark.parametrize(
    ("replayed", "worst"), [(False, "dataset_hash"), (True, "cpu_model")]
)
def test_most_severe_difference_comes_first(replayed, worst):
    other = FINGERPRINT.model_copy(update={"python": "3.12", "torch": "9", worst: "x"})
    checks = compare_fingerprints(FINGERPRINT, other, replayed=replayed)
    assert [check.field for check in checks] == [worst, "torch", "python"]
