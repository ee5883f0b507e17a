"""Trials of a profile in a trial log, which the evidence of commands records."""

import pytest

from autotune.profiles.recorded_trials import add_evidence, read_trials
from autotune.trials.trial_log import TrialLog, read_trial_records, trial_log_sha256
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import example_records, record
from tests.autotune.profiles.runners import runner_with

EXAMPLE = example_profile()
NEWEST_UTC = "2026-01-02T00:00:00+00:00"
"""Time of the example's newest trial."""
OWN = (*example_records(), record(time_utc=NEWEST_UTC, key="newest"))
"""Trials of the example, the newest last."""
OTHER = record(site="there", dataset_hash="e", time_utc="2026-01-03T00:00:00+00:00")
"""Trial of another dataset, newer than all of the example."""


def test_profile_without_trial_log_has_no_trials(tmp_path):
    trials = read_trials(tmp_path / "p.toml", EXAMPLE, tmp_path)
    assert trials.finished == ()
    assert trials.corrupt_lines == 0
    assert trials.check.found == "no trials"


@pytest.fixture
def trial_log(tmp_path):
    """Return a trial log that two profiles of one name share.

    ``OWN`` are the example's trials, ``OTHER`` is one of another dataset.
    """
    trial_log = TrialLog(tmp_path / "p" / "trials", "w")
    for trial in (*OWN, OTHER):
        trial_log.append(trial.model_dump(mode="json"))
    return trial_log


def test_evidence_records_own_trials(trial_log):
    profile = add_evidence(
        EXAMPLE, "workers", EXAMPLE.evidence.workers, runner_with(trial_log)
    )
    records, _ = read_trial_records(trial_log.directory)
    own = [trial for trial in records if trial.site == "here"]
    assert len(own) == len(OWN)
    assert profile.provenance.trial_log_sha256 == trial_log_sha256(own)
    assert profile.provenance.trial_log_until_utc == NEWEST_UTC


@pytest.mark.parametrize(
    ("path", "dataset_hash", "own_trials", "other_trials"),
    [
        pytest.param("a/p.toml", "d", len(OWN), 1, id="example"),
        pytest.param("b/p.toml", "e", 1, len(OWN), id="another dataset"),
    ],
)
def test_profiles_of_one_name_have_their_own_trials(
    tmp_path, trial_log, path, dataset_hash, own_trials, other_trials
):
    # A corrupt line is a trial of neither profile.
    trial_log.append({"no": "trial"})
    profile = but(EXAMPLE, fingerprint={"dataset_hash": dataset_hash})
    trials = read_trials(tmp_path / path, profile, tmp_path)
    assert len(trials.finished) == own_trials
    assert trials.corrupt_lines == 1
    assert trials.check.others == other_trials
