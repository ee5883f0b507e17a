"""Evidence of commands, added to a profile with the settings that it decides."""

import pytest

from autotune.evidence.baseline import BaselineEvidence, BaselineRow
from autotune.evidence.workers import JointChoice
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import with_loader_settings
from autotune.trials.trial_log import TrialLog
from testbed.examples.profiles import example_profile
from tests.autotune.profiles.runners import runner_with

EXAMPLE = example_profile()
BASELINE = BaselineEvidence(
    rows=[
        BaselineRow(
            name="tuned",
            subject="mlm: m",
            units_per_s=[9.0],
            speedup=1.0,
            outcome="ran",
        )
    ],
    unit="tokens",
    local_ranks=1,
    window_s=2.0,
    windows=1,
    seconds=3.0,
)
"""Evidence of a baseline with the settings of the example."""


@pytest.fixture
def runner(tmp_path):
    """Return a runner whose trial log is empty."""
    return runner_with(TrialLog(tmp_path / "trials", "w"))


def swept_to(chosen, *, adopted=None):
    """Return the evidence of a worker sweep.

    Args:
        chosen: Number of workers that it chose.
        adopted: True if its joint search found faster settings, False if not; None if
            no search ran.
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


def add_workers(profile, workers, runner):
    changed = with_loader_settings(profile, workers.loader_settings)
    return add_evidence(profile, "workers", workers, runner, changed)


@pytest.mark.parametrize(
    ("adopted", "settings"),
    [
        (None, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
        (True, {"num_workers": 5, "prefetch_factor": 8, "pin_memory": False}),
        (False, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
    ],
    ids=["no joint search", "adopted", "not adopted"],
)
def test_sweep_writes_its_loader_settings(runner, adopted, settings):
    workers = swept_to(3, adopted=adopted)
    profile = add_workers(EXAMPLE, workers, runner)
    assert profile.train.data == EXAMPLE.train.data.model_copy(update=settings)
    assert profile.evidence.workers == workers
    assert profile.evidence.probe == EXAMPLE.evidence.probe


def test_repeated_sweep_is_named_once(runner):
    profile = add_workers(EXAMPLE, swept_to(2), runner)
    profile = add_workers(profile, swept_to(3), runner)
    assert profile.train.data.num_workers == 3
    assert profile.evidence.workers == swept_to(3)
    assert profile.provenance.commands == ["probe", "workers"]


@pytest.fixture
def with_baseline(runner):
    """Return the example with the evidence of a baseline."""
    return add_evidence(EXAMPLE, "baseline", BASELINE, runner)


def test_baseline_changes_no_settings(with_baseline):
    assert with_baseline.train == EXAMPLE.train
    assert with_baseline.evidence.baseline == BASELINE
    assert with_baseline.provenance.commands == ["probe", "baseline"]


def test_baseline_is_kept_with_its_settings(runner, with_baseline):
    # The example has one worker.
    profile = add_workers(with_baseline, swept_to(1), runner)
    assert profile.evidence.baseline == BASELINE
    assert profile.provenance.commands == ["probe", "baseline", "workers"]


def test_baseline_is_dropped_with_its_settings(runner, with_baseline):
    profile = add_workers(with_baseline, swept_to(2), runner)
    assert profile.evidence.baseline is None
    assert profile.provenance.commands == ["probe", "workers"]
