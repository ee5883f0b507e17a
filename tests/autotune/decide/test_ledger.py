import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.trial import TrialRecord
from autotune.decide.ledger import check_ledger, compare, ledger_sha256, own_records
from tests.autotune.profiles import FINGERPRINT, but, example_profile
from tests.autotune.trials import record, records_of_example

EXAMPLE = records_of_example()


def _resting_on(records, **changes):
    said = {"ledger_sha256": ledger_sha256(records), "ledger_until_utc": max(one.time_utc for one in records)}
    return but(example_profile(), provenance=said | changes)


def _with_probe(profile, **figures):
    return but(profile, evidence={"probe": profile.evidence.probe.model_copy(update=figures)})


@pytest.mark.parametrize(
    "where", [{"model_sha256": "other"}, {"dataset_hash": "other"}, {"cpu_model": "Another"}, {"gpu_name": "H100"}]
)
def test_trials_of_another_model_dataset_or_device_are_not_the_profiles(where):
    mine, other = record(), record(site="there", **where)
    assert own_records([mine, other], FINGERPRINT, None) == (mine,)


def test_other_versions_and_fewer_processors_leave_a_trial_the_profiles():
    trials = (record(), record(site="there", torch="2.14.0"), record(site="elsewhere", allotted_cpus=1))
    assert own_records(trials, FINGERPRINT, None) == trials


def test_rows_of_another_length_are_another_tuning():
    mine, unsaid = record(config={"seq_length_tokens": 512}), record("links", outcome={"kind": "crashed", "detail": ""})
    other = record(config={"seq_length_tokens": 128})
    assert own_records([mine, other, unsaid], FINGERPRINT, 512) == (mine, unsaid)
    assert own_records([mine, other, unsaid], FINGERPRINT, None) == (mine, other, unsaid)


def test_a_gpus_steps_may_be_replayed_on_a_processor():
    of_gpu = FINGERPRINT.model_copy(update={"device": "cuda", "gpu_name": "H100"})
    trials = (record(gpu_name="H100", gpu_count=2), record(site="cpu", cpu_model="Any"))
    assert own_records(trials, of_gpu, None) == trials
    assert own_records([record(gpu_name="A100")], of_gpu, None) == ()


def test_old_trials_are_known_by_their_settings_and_those_without_any_by_their_neighbours():
    mine = (record(old=True, config={"data": {"dataset_hash": "d"}}), record("step", old=True))
    others = (
        record(old=True, site="there", config={"data": {"dataset_hash": "e"}}),
        record("step", old=True, site="there"),
        record(old=True, site="elsewhere", config={"model": {"name": "tiny", "config": {}}}),
    )
    assert own_records((*mine, *others), FINGERPRINT, None) == mine


@given(st.permutations(EXAMPLE))
def test_the_hash_is_of_the_trials_and_not_of_their_order(records):
    assert ledger_sha256(records) == ledger_sha256(EXAMPLE)


@given(st.integers(0, len(EXAMPLE) - 1), st.sampled_from(["lost", "changed", "twice"]))
def test_a_trial_that_was_lost_changed_or_put_in_shows(index, how):
    one = EXAMPLE[index]
    instead = {"lost": (), "changed": (one.model_copy(update={"seconds": 2.0}),), "twice": (one, one)}[how]
    found = check_ledger(_resting_on(EXAMPLE), (*EXAMPLE[:index], *instead, *EXAMPLE[index + 1 :]))
    assert found.found == "differs"


def test_trials_of_later_and_of_others_change_nothing():
    later, other = record(time_utc="2026-01-02T00:00:00+00:00"), record(site="there", dataset_hash="e")
    found = check_ledger(_resting_on(EXAMPLE), (*EXAMPLE, other, later))
    assert (found.found, found.trials, found.added, found.others) == ("same", len(EXAMPLE), 1, 1)
    assert found.unfounded == ()
    unknown = check_ledger(_resting_on(EXAMPLE, ledger_until_utc=None), EXAMPLE)
    assert (unknown.found, unknown.unfounded) == ("not recomputable", ())


def test_without_trials_of_its_own_nothing_is_said_of_a_profile():
    for records in ((), (record(site="there", dataset_hash="e"),)):
        found = check_ledger(_resting_on(EXAMPLE), records)
        assert (found.found, found.trials, found.others, found.unfounded) == ("no trials", 0, len(records), ())


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"feasible_max": 64}, "evidence.probe.feasible_max = 64 rows, with its peak"),
        ({"feasible_peak_bytes": 1}, "evidence.probe.feasible_max = 2 rows, with its peak"),
        ({"infeasible_min": 65}, "evidence.probe.infeasible_min = 65 rows"),
    ],
)
def test_a_figure_that_no_trial_gave_is_named_whatever_hash_the_profile_has(figures, named):
    found = check_ledger(_with_probe(_resting_on(EXAMPLE), **figures), EXAMPLE)
    assert (found.found, found.unfounded) == ("same", (named,))


def test_a_speed_that_no_trial_had_is_named():
    profile = _resting_on(EXAMPLE)
    curve = [point.model_copy(update={"slot_tokens_per_s": 901.0}) for point in profile.evidence.probe.curve[1:]]
    workers = profile.evidence.workers
    rows = [row.model_copy(update={"slot_tokens_per_s": [99.0, 500.0]}) for row in workers.rows[1:]]
    workers = workers.model_copy(update={"rows": rows, "ceiling_slot_tokens_per_s": [103.0]})
    edited = but(_with_probe(profile, curve=curve), evidence={"workers": workers})
    assert check_ledger(edited, EXAMPLE).unfounded == (
        "evidence.probe.curve at 2 rows",
        "evidence.workers.ceiling_slot_tokens_per_s",
        "evidence.workers.rows of 1",
    )


@pytest.mark.parametrize("figures", [{"step_s": ["x"]}, {"slot_tokens_per_step": "x"}, {"peak_bytes": []}])
def test_a_record_with_hostile_figures_is_no_trial(figures):
    (odd,) = (one for one in _with_figures(2, figures) if one not in EXAMPLE)
    assert TrialRecord.of(odd.model_dump(mode="json")) is None
    assert TrialRecord.of(EXAMPLE[2].model_dump(mode="json")) == EXAMPLE[2]


@pytest.mark.parametrize("figures", [{"step_s": []}, {"step_s": [0]}])
def test_hostile_speeds_of_a_ledger_are_no_figures(figures):
    assert check_ledger(_resting_on(EXAMPLE), _with_figures(2, figures)).unfounded == (
        "evidence.probe.curve at 1 rows",
    )


def _with_figures(index, figures):
    outcome = {"kind": "measured", "figures": EXAMPLE[index].outcome["figures"] | figures}
    odd = EXAMPLE[index].model_copy(update={"outcome": outcome})
    return (*EXAMPLE[:index], odd, *EXAMPLE[index + 1 :])


def test_the_same_machine_has_no_mismatch():
    assert compare(FINGERPRINT, FINGERPRINT) == ()


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({"dataset_hash": "other"}, "refuse"),
        ({"model_sha256": "other"}, "refuse"),
        ({"device": "cuda"}, "refuse"),
        ({"torch": "2.14.0"}, "warn"),
        ({"python": "3.12.0"}, "inform"),
    ],
)
def test_a_difference_weighs_what_it_does_to_the_figures(change, severity):
    found = compare(FINGERPRINT, FINGERPRINT.model_copy(update=change))
    assert [check.found for check in found] == [severity]


def test_less_gpu_memory_is_refused_and_more_is_not():
    card = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 99}))[0].found == "refuse"
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 101}))[0].found == "inform"


@pytest.mark.parametrize(("replayed", "worst"), [(False, "dataset_hash"), (True, "cpu_model")])
def test_the_worst_comes_first(replayed, worst):
    other = FINGERPRINT.model_copy(update={"python": "3.12", "torch": "9", worst: "x"})
    found = compare(FINGERPRINT, other, replayed=replayed)
    assert [check.field for check in found] == [worst, "torch", "python"]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cuda"},
        {"gpu_name": "NVIDIA H200", "gpu_count": 8, "gpu_total_bytes": 2**37, "gpu_mig": False},
        {"gpu_power_cap_w": 700.0, "driver": "580.1", "cuda": "13.0"},
    ],
)
def test_where_a_step_is_replayed_the_gpu_does_not_matter(change):
    assert compare(FINGERPRINT.model_copy(update=change), FINGERPRINT, replayed=True) == ()


@pytest.mark.parametrize("change", [{"cpu_model": "Another CPU"}, {"data_filesystem": "lustre"}])
def test_where_a_step_is_replayed_cpu_and_disk_must_be_the_same(change):
    other = FINGERPRINT.model_copy(update=change)
    assert [check.found for check in compare(FINGERPRINT, other)] == ["warn"]
    assert [check.found for check in compare(FINGERPRINT, other, replayed=True)] == ["refuse"]
