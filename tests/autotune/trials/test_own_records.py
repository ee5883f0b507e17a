"""Trials of a profile's trial log that belong to the profile itself."""

import pytest

from autotune.trials.decide.own_records import own_records
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import record

GPU_FINGERPRINT = FINGERPRINT.model_copy(update={"device": "cuda", "gpu_name": "H100"})
OWN_TRIAL = record()
TRIAL_OF_128_TOKENS = record(config={"seq_length_tokens": 128})
TRIAL_OF_512_TOKENS = record(config={"seq_length_tokens": 512})
TRIAL_WITHOUT_SEQUENCES = record("links", outcome={"kind": "crashed", "detail": ""})


@pytest.mark.parametrize(
    "made_on",
    [
        pytest.param({"model_sha256": "other"}, id="model"),
        pytest.param({"dataset_hash": "other"}, id="dataset"),
        pytest.param({"cpu_model": "Another"}, id="CPU"),
        pytest.param({"gpu_name": "H100"}, id="GPU instead of CPU"),
    ],
)
def test_trial_with_another_fingerprint_is_foreign(made_on):
    foreign_trial = record(site="other", **made_on)
    assert own_records([OWN_TRIAL, foreign_trial], FINGERPRINT, None) == (OWN_TRIAL,)


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(record(site="other", torch="2.14.0"), id="software"),
        pytest.param(record(allotted_cpus=1), id="share of the CPUs"),
    ],
)
def test_trial_with_other_software_or_cpus_is_own(trial):
    assert own_records([OWN_TRIAL, trial], FINGERPRINT, None) == (OWN_TRIAL, trial)


def test_trial_of_another_sequence_length_is_foreign():
    records = [TRIAL_OF_512_TOKENS, TRIAL_WITHOUT_SEQUENCES, TRIAL_OF_128_TOKENS]
    own = own_records(records, FINGERPRINT, seq_length_tokens=512)
    assert own == (TRIAL_OF_512_TOKENS, TRIAL_WITHOUT_SEQUENCES)


def test_profile_without_sequence_length_owns_any():
    records = (TRIAL_OF_512_TOKENS, TRIAL_OF_128_TOKENS, TRIAL_WITHOUT_SEQUENCES)
    assert own_records(records, FINGERPRINT, seq_length_tokens=None) == records


def test_gpu_steps_replayed_on_a_cpu_are_own():
    on_gpu = record(gpu_name="H100", gpu_count=2)
    replayed = record(site="cpu", cpu_model="Any")
    own = own_records([on_gpu, replayed], GPU_FINGERPRINT, None)
    assert own == (on_gpu, replayed)


def test_trial_on_another_gpu_is_foreign():
    assert own_records([record(gpu_name="A100")], GPU_FINGERPRINT, None) == ()


# Trial logs of older versions do not record where a trial was made. The settings of a
# trial may name its dataset or model. If they do, all old trials of its site are of
# them.


def test_old_trials_of_a_known_site_are_own():
    named = record(old=True, config={"data": {"dataset_hash": "d"}})
    unnamed = record("step", old=True)
    assert own_records([named, unnamed], FINGERPRINT, None) == (named, unnamed)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"data": {"dataset_hash": "e"}}, id="dataset"),
        pytest.param({"model": {"name": "tiny", "config": {}}}, id="model"),
    ],
)
def test_old_trials_of_another_site_are_foreign(config):
    named = record(old=True, site="other", config=config)
    unnamed = record("step", old=True, site="other")
    assert own_records([OWN_TRIAL, named, unnamed], FINGERPRINT, None) == (OWN_TRIAL,)
