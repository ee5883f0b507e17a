"""Trials that a trial log holds of one profile, among those of others."""

import pytest

from autotune.trials.trial_log import own_records
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import record

OF_GPU = FINGERPRINT.model_copy(update={"device": "cuda", "gpu_name": "H100"})
OWN = record()
# Records of older versions do not name their machine, model and dataset.
OLD = record("step", old=True)
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
    other = record(site="other", **fingerprint)
    assert own_records([OWN, other], FINGERPRINT, None) == (OWN,)


def test_other_software_or_cpu_share_is_own():
    records = (OWN, record(site="other", torch="2.14.0"), record(allotted_cpus=1))
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
        record(old=True, site="other", config=other_dataset),
        # Without settings, beside a trial of another dataset.
        record("step", old=True, site="other"),
        record(old=True, site="third", config=other_model),
    ]
    records = [KNOWN_OLD, OLD, *others]
    assert own_records(records, FINGERPRINT, None) == (KNOWN_OLD, OLD)
