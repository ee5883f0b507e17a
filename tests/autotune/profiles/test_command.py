import json

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.trial_log import (
    TrialLog,
    made_on,
    read_trial_records,
    trial_log_sha256,
)
from autotune.trials.values import MadeOn
from testbed.examples.profiles import but
from testbed.examples.trials import example_records
from testbed.examples.tuning import example_profile as full_example

VERIFY = ("profile", "verify", "p.toml")


@pytest.fixture
def workdir(workdir_with_data):
    """Return the working directory with a dataset and a profile of this machine."""
    return workdir_with_data


def edit(path, old, new):
    """Replace a text that a file must contain, once."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_show_names_decisions(workdir, says):
    out = says("profile", "show", "p.toml")
    assert "micro-batch size" in out
    assert "approval: not reviewed" in out


def test_show_names_the_approval(workdir, says):
    says("profile", "approve", "p.toml", "--by", "reviewer")
    assert "approval: approved by reviewer" in says("profile", "show", "p.toml")
    answer = json.loads(says("profile", "show", "p.toml", "--json"))
    assert answer["intact"] is True
    assert answer["approval"] == "approved"


def test_verify_requires_approval_of_the_content(workdir, says):
    verify = ["profile", "verify", "p.toml", "--require-approved"]
    assert "is not approved (hash" in says(*verify, code=6)
    says("profile", "approve", "p.toml", "--by", "reviewer")
    says(*verify)
    edit(workdir / "p.toml", "micro_batch_size = 2", "micro_batch_size = 1")
    says(*verify, code=6)


def test_verify_compares_every_field(workdir, says):
    checks = json.loads(says("profile", "verify", "p.toml", "--json"))["checks"]
    assert {check["found"] for check in checks} == {"same"}
    assert "dataset_hash" in {check["field"] for check in checks}


@pytest.mark.parametrize(
    ("old", "new", "exit_code", "field"),
    [
        pytest.param(
            "hidden_size = 64", "hidden_size = 32", 6, "model_sha256", id="model"
        ),
        pytest.param(
            'device = "cpu"', 'device = "cuda"', 6, "train.device", id="device"
        ),
        pytest.param(
            "micro_batch_size = 2", "micro_batch_size = 1", 0, "content", id="setting"
        ),
        pytest.param(
            'cpu_model = "', 'cpu_model = "Another ', 0, "cpu_model", id="CPU"
        ),
        pytest.param('torch = "', 'torch = "0.', 0, "torch", id="torch"),
        pytest.param(
            'transformers = "',
            'transformers = "0.',
            0,
            "transformers",
            id="transformers",
        ),
    ],
)
def test_verify_names_differences(workdir, capsys, old, new, exit_code, field):
    edit(workdir / "p.toml", old, new)
    assert run([*VERIFY]) == exit_code
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith(field)]
    assert any("differs" in line for line in lines)
    # Any edit changes the content, which is a warning.
    assert "differs (warning)" in out
    assert "modified since it was written" in out
    # Only errors are named on standard error.
    assert (field in err) == (exit_code != 0)


def test_verify_without_dataset_is_not_checkable(workdir, says):
    (workdir / "data").unlink()
    assert "dataset_hash" in says("profile", "verify", "p.toml", code=7)


def test_verify_rejects_another_dataset(workdir, says, make_dataset):
    (workdir / "data").unlink()
    other = make_dataset([[5, 6, 7]]).rename(workdir / "other")
    verify = ("profile", "verify", "p.toml", "--data", str(other))
    assert "dataset_hash" in says(*verify, code=6)


def test_verify_without_trial_log_knows_nothing_of_it(workdir, says):
    words = "trial log: unknown: the trial log holds no trial of this profile"
    assert words in says(*VERIFY)


@pytest.fixture
def trial_log(workdir):
    """Write the trial log that the profile rests on."""
    path = workdir / "p.toml"
    profile = read_profile(path).profile
    here = MadeOn(**dict(made_on(profile.fingerprint)))
    records = [
        record.model_copy(update={"made_on": here}) for record in example_records()
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


def test_verify_compares_with_the_trial_log(trial_log, says):
    words = "trial log: the hash of 8 trials matches; the largest"
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
    inserted = read_trial_records(trial_log.directory)[0][0]
    trial_log.append(inserted.model_dump(mode="json", exclude_unset=True))
    answer = json.loads(says(*VERIFY, "--json"))
    assert answer["trial_log"]["found"] == "differs"


def test_explain_lists_all_settings(workdir, says):
    out = says("profile", "show", "p.toml", "--explain")
    assert "defaults:" in out
    assert "max_steps = 1000" in out


def test_show_key_explains_one_setting(workdir, says):
    out = says("profile", "show", "p.toml", "data.num_workers")
    assert "DataLoader workers per GPU" in out
    assert "99.0 % (98.5 % to 99.5 %, 98 %), n = 3" in out
    assert "rejected" in out


def test_show_key_explains_a_group(workdir, says):
    answer = json.loads(says("profile", "show", "p.toml", "data", "--json"))
    keys = {explanation["key"] for explanation in answer}
    assert keys >= {"data.path", "data.num_workers"}


def test_show_suggests_the_nearest_key(workdir, says):
    show = ("profile", "show", "p.toml", "micro_batch_row")
    assert "'micro_batch_size'" in says(*show, code=3)


@pytest.fixture
def explored(workdir):
    """Write a profile with the evidence of an exploration."""
    (workdir / "p.toml").write_text(profile_to_toml(full_example("d")))


def test_explain_names_an_exploration_once(explored, says):
    out = says("profile", "show", "p.toml", "--explain")
    assert out.count("Tried 4 of 107 other configurations") == 1


def test_show_key_omits_the_exploration(explored, says):
    out = says("profile", "show", "p.toml", "layout")
    assert "measured: joint search of the step's settings" in out
    assert "Tried 4 of 107" not in out


@pytest.mark.parametrize(
    "arguments", [(), ("--explain",), ("micro_batch_size",)], ids=" ".join
)
def test_show_escapes_control_characters(workdir, says, arguments):
    choice = 'choice = "\\u001b[31m\\u202ebecause"'
    edit(workdir / "p.toml", 'choice = "because"', choice)
    created = 'created_utc = "\\u001b]0;x\\u00072026'
    edit(workdir / "p.toml", 'created_utc = "2026', created)
    out = says("profile", "show", "p.toml", *arguments)
    assert all(character.isprintable() or character == "\n" for character in out)
