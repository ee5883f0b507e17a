"""``profile verify``: comparison with this machine, the approval and the trial log."""

import json
from dataclasses import dataclass

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.trial_bench import site_facts
from autotune.trials.trial_log import (
    TrialLog,
    read_trial_records,
    trial_log_sha256,
)
from testbed.examples.profiles import but
from testbed.examples.trials import example_records
from tests.autotune.profiles.profile_files import edit

VERIFY = ("profile", "verify", "p.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Edit of a profile, and the field that then differs from this machine."""

    old: str
    new: str
    field: str


# The profile is of this machine, whose CPU and versions no test can know: edits put a
# text before them.
INVALIDATING_EDITS = [
    pytest.param(
        Edit(old="hidden_size = 64", new="hidden_size = 32", field="model_sha256"),
        id="model",
    ),
    pytest.param(
        Edit(old='device = "cpu"', new='device = "cuda"', field="train.device"),
        id="device",
    ),
]
"""Edits after which the figures of the profile do not hold here."""
MINOR_EDITS = [
    pytest.param(
        Edit(old="micro_batch_size = 2", new="micro_batch_size = 1", field="content"),
        id="setting",
    ),
    pytest.param(
        Edit(old='cpu_model = "', new='cpu_model = "Another ', field="cpu_model"),
        id="CPU",
    ),
    pytest.param(Edit(old='torch = "', new='torch = "0.', field="torch"), id="torch"),
    pytest.param(
        Edit(old='transformers = "', new='transformers = "0.', field="transformers"),
        id="transformers",
    ),
]
"""Edits after which the figures of the profile may still hold here."""


def lines_on(field, text):
    """Return the lines of a table that begin with a field."""
    return [line for line in text.splitlines() if line.startswith(field)]


@pytest.fixture
def workdir(workdir_with_data):
    """Return the working directory with a dataset and a profile of this machine."""
    return workdir_with_data


@pytest.fixture
def trial_log(workdir):
    """Return the trial log of the profile, which records its hash.

    It has the trials of the example, as if they had run on this machine.
    """
    path = workdir / "p.toml"
    profile = read_profile(path).profile
    made_here = site_facts(profile.fingerprint)
    records = [
        record.model_copy(update={"made_on": made_here}) for record in example_records()
    ]
    provenance = {
        "trial_log_sha256": trial_log_sha256(records),
        "trial_log_until_utc": records[-1].time_utc,
    }
    path.write_text(profile_to_toml(but(profile, provenance=provenance)))
    trial_log = TrialLog(workdir / "reports" / "p" / "trials", "w")
    for record in records:
        trial_log.append(record.model_dump(mode="json", exclude_unset=True))
    return trial_log


def test_verify_compares_every_field(workdir, says):
    checks = json.loads(says(*VERIFY, "--json"))["checks"]
    assert {check["found"] for check in checks} == {"same"}
    assert "dataset_hash" in {check["field"] for check in checks}


@pytest.mark.parametrize("change", INVALIDATING_EDITS)
def test_verify_rejects_an_invalidating_edit(workdir, capsys, change):
    edit(workdir / "p.toml", change.old, change.new)
    assert run(list(VERIFY)) == 6
    out, err = capsys.readouterr()
    assert any("differs" in line for line in lines_on(change.field, out))
    assert change.field in err


@pytest.mark.parametrize("change", MINOR_EDITS)
def test_verify_accepts_a_minor_edit(workdir, capsys, change):
    edit(workdir / "p.toml", change.old, change.new)
    assert run(list(VERIFY)) == 0
    out, err = capsys.readouterr()
    assert any("differs" in line for line in lines_on(change.field, out))
    # Only errors are named on standard error.
    assert change.field not in err


@pytest.mark.parametrize("change", [*INVALIDATING_EDITS, *MINOR_EDITS])
def test_verify_warns_of_edited_content(workdir, capsys, change):
    edit(workdir / "p.toml", change.old, change.new)
    run(list(VERIFY))
    out, _ = capsys.readouterr()
    assert any("differs (warning)" in line for line in lines_on("content", out))
    assert "modified since it was written" in out


def test_verify_without_dataset_is_not_checkable(workdir, says):
    (workdir / "data").unlink()
    assert "dataset_hash" in says(*VERIFY, code=7)


def test_verify_rejects_another_dataset(workdir, says, make_dataset):
    (workdir / "data").unlink()
    other = make_dataset([[5, 6, 7]]).rename(workdir / "other")
    assert "dataset_hash" in says(*VERIFY, "--data", str(other), code=6)


def test_verify_requires_approval_of_the_content(workdir, says):
    verify = (*VERIFY, "--require-approved")
    assert "is not approved (hash" in says(*verify, code=6)
    says("profile", "approve", "p.toml", "--by", "reviewer")
    says(*verify)
    edit(workdir / "p.toml", "micro_batch_size = 2", "micro_batch_size = 1")
    says(*verify, code=6)


def test_verify_without_trial_log_knows_nothing_of_it(workdir, says):
    words = "trial log: unknown: the trial log holds no trial of this profile"
    assert words in says(*VERIFY)


def test_verify_compares_with_the_trial_log(trial_log, says):
    trials = len(example_records())
    words = f"trial log: the hash of {trials} trials matches; the largest"
    assert words in says(*VERIFY)


def test_edit_with_new_hash_shows_in_trial_log(trial_log, workdir, says):
    path = workdir / "p.toml"
    profile = read_profile(path).profile
    probe = profile.evidence.probe.model_copy(update={"feasible_max": 64})
    path.write_text(profile_to_toml(but(profile, evidence={"probe": probe})))
    out = says(*VERIFY)
    # An edit with a new hash leaves the content intact.
    assert "unmodified" in out
    assert "no trial matches evidence.probe.feasible_max = 64" in out


def test_inserted_trial_differs(trial_log, says):
    records, _ = read_trial_records(trial_log.directory)
    trial_log.append(records[0].model_dump(mode="json", exclude_unset=True))
    answer = json.loads(says(*VERIFY, "--json"))
    assert answer["trial_log"]["found"] == "differs"
