import json

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.values import profile_to_toml
from autotune.trials.trial_log import TrialLog, made_on, trial_log_sha256
from autotune.trials.values import MadeOn
from testbed.examples.profiles import but
from testbed.examples.trials import example_records
from testbed.examples.tuning import example_profile as full_example
from tests.autotune.report.test_command import _change


@pytest.fixture
def workdir(workdir_with_data):
    return workdir_with_data


def test_show_names_decisions_and_how_the_profile_stands(workdir, says):
    out = says("profile", "show", "p.toml")
    assert "micro-batch size" in out
    assert "approval: not reviewed" in out
    verify = ["profile", "verify", "p.toml", "--require-approved"]
    assert "is not approved (hash" in says(*verify, code=6)
    says("profile", "approve", "p.toml", "--by", "reviewer")
    says(*verify)
    assert "approval: approved by reviewer" in says("profile", "show", "p.toml")
    told = json.loads(says("profile", "show", "p.toml", "--json"))
    assert (told["intact"], told["approval"]) == (True, "approved")
    _change(workdir / "p.toml", "micro_batch_size = 2", "micro_batch_size = 1")
    says(*verify, code=6)


@pytest.mark.parametrize(
    ("old", "new", "code", "field"),
    [
        ("hidden_size = 64", "hidden_size = 32", 6, "model_sha256"),
        ('device = "cpu"', 'device = "cuda"', 6, "train.device"),
        ("micro_batch_size = 2", "micro_batch_size = 1", 0, "content"),
        ('cpu_model = "', 'cpu_model = "Another ', 0, "cpu_model"),
        ('torch = "', 'torch = "0.', 0, "torch"),
        ('transformers = "', 'transformers = "0.', 0, "transformers"),
    ],
)
def test_what_differs_from_here_is_refused_or_told_as_it_matters(
    workdir, says, capsys, old, new, code, field
):
    checks = json.loads(says("profile", "verify", "p.toml", "--json"))["checks"]
    assert {check["found"] for check in checks} == {"same"}
    assert "dataset_hash" in {check["field"] for check in checks}
    _change(workdir / "p.toml", old, new)
    assert run(["profile", "verify", "p.toml"]) == code
    out, err = capsys.readouterr()
    assert any(
        line.startswith(field) and "differs" in line for line in out.splitlines()
    )
    assert "differs (warning)" in out
    assert "modified since it was written" in out
    assert (field in err) == bool(code)


def test_another_dataset_is_refused_and_an_absent_one_is_not_checkable(
    workdir, says, make_dataset
):
    (workdir / "data").unlink()
    other = make_dataset([[5, 6, 7]]).rename(workdir / "other")
    assert "dataset_hash" in says("profile", "verify", "p.toml", code=7)
    assert "dataset_hash" in says(
        "profile", "verify", "p.toml", "--data", str(other), code=6
    )


def test_verify_holds_the_profile_against_its_ledger_and_an_edit_with_a_new_hash_shows_there(
    workdir, says
):
    assert "trial log: unknown: the trial log holds no trial of this profile" in says(
        "profile", "verify", "p.toml"
    )
    profile = read_profile(workdir / "p.toml").profile
    mine = dict(made_on(profile.fingerprint))
    records = [
        one.model_copy(update={"made_on": MadeOn(**mine)}) for one in example_records()
    ]
    rests_on = {
        "trial_log_sha256": trial_log_sha256(records),
        "trial_log_until_utc": records[-1].time_utc,
    }
    (workdir / "p.toml").write_text(profile_to_toml(but(profile, provenance=rests_on)))
    trial_log = TrialLog(workdir / "reports" / "p" / "trials", "w")
    for one in records:
        trial_log.append(one.model_dump(mode="json", exclude_unset=True))
    assert "trial log: the hash of 8 trials matches; the largest" in says(
        "profile", "verify", "p.toml"
    )
    probe = profile.evidence.probe.model_copy(update={"feasible_max": 64})
    (workdir / "p.toml").write_text(
        profile_to_toml(but(profile, provenance=rests_on, evidence={"probe": probe}))
    )
    out = says("profile", "verify", "p.toml")
    assert "unmodified" in out  # whoever edits may write a new hash
    assert "no trial matches evidence.probe.feasible_max = 64" in out
    trial_log.append(records[0].model_dump(mode="json", exclude_unset=True))
    assert (
        json.loads(says("profile", "verify", "p.toml", "--json"))["trial_log"]["found"]
        == "differs"
    )


def test_explain_gives_all_settings_or_one_and_says_once_what_an_exploration_found(
    workdir, says
):
    out = says("profile", "show", "p.toml", "--explain")
    assert "defaults:" in out
    assert "max_steps = 1000" in out
    out = says("profile", "show", "p.toml", "data.num_workers")
    assert "DataLoader workers per GPU" in out
    assert "0.990 (0.985 to 0.995, 98 %), n = 3" in out
    assert "rejected" in out
    told = {
        one["key"]
        for one in json.loads(says("profile", "show", "p.toml", "data", "--json"))
    }
    assert told >= {"data.path", "data.num_workers"}
    assert "'micro_batch_size'" in says(
        "profile", "show", "p.toml", "micro_batch_row", code=3
    )
    (workdir / "p.toml").write_text(profile_to_toml(full_example("d")))
    assert (
        says("profile", "show", "p.toml", "--explain").count(
            "Tried 4 of 107 other configurations"
        )
        == 1
    )
    out = says("profile", "show", "p.toml", "layout")
    assert "measured: joint search of the step's settings" in out
    assert "Tried 4 of 107" not in out


def test_hostile_words_in_a_profile_steer_nothing(workdir, says):
    _change(
        workdir / "p.toml", 'choice = "because"', 'choice = "\\u001b[31m\\u202ebecause"'
    )
    _change(
        workdir / "p.toml",
        'created_utc = "2026',
        'created_utc = "\\u001b]0;x\\u00072026',
    )
    for command, *key in (
        ("show",),
        ("show", "--explain"),
        ("show", "micro_batch_size"),
    ):
        assert all(
            c.isprintable() or c == "\n"
            for c in says("profile", command, "p.toml", *key)
        )
