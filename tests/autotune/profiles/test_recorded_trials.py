from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.baseline.values import BaselineEvidence, RecipeRow
from autotune.profiles.recorded_trials import add_evidence, read_trials
from autotune.trials.trial_log import TrialLog, read_trial_records, trial_log_sha256
from autotune.workers.stage import add_workers
from autotune.workers.values import JointChoice
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import example_records, record

EXAMPLE = example_profile()
RUNNER = SimpleNamespace(trial_log=SimpleNamespace(directory=Path("nowhere")))
"""Runner whose trial log is empty: evidence takes nothing else of it."""
BASELINE = BaselineEvidence(
    rows=[RecipeRow(name="tuned", tokens_per_s=[9.0], speedup=1.0, outcome="ran")],
    local_ranks=1,
    window_s=2.0,
    windows=1,
    seconds=3.0,
)
"""Evidence of a baseline with the settings of the example."""
NEWEST_UTC = "2026-01-02T00:00:00+00:00"
OWN = (*example_records(), record(time_utc=NEWEST_UTC, key="newest"))
"""Trials of the example, the newest last."""
OTHER = record(site="there", dataset_hash="e", time_utc="2026-01-03T00:00:00+00:00")
"""Trial of another dataset, newer than all of the example."""


def swept_to(chosen, *, adopted=None):
    """Return the evidence of a sweep.

    Args:
        chosen: Its number of workers.
        adopted: True if a joint search found faster settings, False if not; None if no
            search ran.
    """
    joint = None
    if adopted is not None:
        joint = JointChoice(
            trials=12,
            num_workers=5,
            prefetch_factor=8,
            pin_memory=False,
            ratio_to_workers_alone=1.2,
            adopted=adopted,
        )
    workers = EXAMPLE.evidence.workers
    return workers.model_copy(update={"chosen": chosen, "joint": joint})


@pytest.mark.parametrize(
    ("adopted", "settings"),
    [
        (None, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
        (True, {"num_workers": 5, "prefetch_factor": 8, "pin_memory": False}),
        (False, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
    ],
    ids=["no joint search", "adopted", "not adopted"],
)
def test_sweep_writes_its_loader_settings(adopted, settings):
    workers = swept_to(3, adopted=adopted)
    profile = add_workers(EXAMPLE, workers, RUNNER)
    assert profile.train.data == EXAMPLE.train.data.model_copy(update=settings)
    assert profile.evidence.workers == workers
    assert profile.evidence.probe == EXAMPLE.evidence.probe


def test_repeated_sweep_is_named_once():
    profile = add_workers(EXAMPLE, swept_to(2), RUNNER)
    profile = add_workers(profile, swept_to(3), RUNNER)
    assert profile.train.data.num_workers == 3
    assert profile.evidence.workers == swept_to(3)
    assert profile.provenance.commands == ["probe", "workers"]


@pytest.fixture
def with_baseline():
    """Return the example with the evidence of a baseline."""
    return add_evidence(EXAMPLE, "baseline", BASELINE, RUNNER)


def test_baseline_changes_no_settings(with_baseline):
    assert with_baseline.train == EXAMPLE.train
    assert with_baseline.evidence.baseline == BASELINE
    assert with_baseline.provenance.commands == ["probe", "baseline"]


def test_baseline_is_kept_with_its_settings(with_baseline):
    profile = add_workers(with_baseline, swept_to(1), RUNNER)
    assert profile.evidence.baseline == BASELINE
    assert profile.provenance.commands == ["probe", "baseline", "workers"]


def test_baseline_is_dropped_with_its_settings(with_baseline):
    profile = add_workers(with_baseline, swept_to(2), RUNNER)
    assert profile.evidence.baseline is None
    assert profile.provenance.commands == ["probe", "workers"]


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


def test_provenance_covers_own_trials(trial_log):
    runner = SimpleNamespace(trial_log=trial_log)
    provenance = add_workers(EXAMPLE, swept_to(3), runner).provenance
    records, _ = read_trial_records(trial_log.directory)
    own = [record for record in records if record.site == "here"]
    assert len(own) == len(OWN)
    assert provenance.trial_log_sha256 == trial_log_sha256(own)
    assert provenance.trial_log_until_utc == NEWEST_UTC


@pytest.mark.parametrize(
    ("path", "dataset_hash", "own", "others"),
    [
        pytest.param("a/p.toml", "d", len(OWN), 1, id="example"),
        pytest.param("b/p.toml", "e", 1, len(OWN), id="another dataset"),
    ],
)
def test_profiles_of_one_name_have_their_own_trials(
    tmp_path, trial_log, path, dataset_hash, own, others
):
    # A corrupt line, which is neither's.
    trial_log.append({"no": "trial"})
    profile = but(EXAMPLE, fingerprint={"dataset_hash": dataset_hash})
    trials = read_trials(tmp_path / path, profile, tmp_path)
    assert len(trials.finished) == own
    assert trials.corrupt_lines == 1
    assert trials.check.others == others
