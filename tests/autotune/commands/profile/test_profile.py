import json

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from autotune.core.trial import MadeOn
from autotune.decide.ledger import ledger_sha256
from autotune.measure.nvml import NvmlMonitor
from autotune.search.profiles import read_profile
from autotune.search.trials import made_on
from autotune.store import Ledger
from tests.autotune.show.report.example import example_profile as full_example
from tests.autotune.trials import records_of_example


@pytest.fixture
def here(made_here):
    return made_here


APPROVE = ["report", "review", "p.toml", "--approve", "--by", "reviewer"]


def _write(path, profile):
    path.write_text(profile_to_toml(profile))


def _change(here, old, new):
    text = (here / "p.toml").read_text()
    assert old in text
    (here / "p.toml").write_text(text.replace(old, new))


def test_show_names_decisions_and_how_the_profile_stands(here, says):
    out = says("profile", "show", "p.toml")
    assert "micro-batch rows" in out
    assert "review: not reviewed" in out
    says(*APPROVE)
    assert "review: approved by reviewer" in says("profile", "show", "p.toml")
    told = json.loads(says("profile", "show", "p.toml", "--json"))
    assert (told["intact"], told["review"]) == (True, "approved")


def test_a_profile_verifies_on_the_machine_that_made_it(here, says):
    checks = json.loads(says("profile", "verify", "p.toml", "--json"))["checks"]
    assert {check["found"] for check in checks} == {"same"}
    assert "dataset_hash" in {check["field"] for check in checks}


def test_verify_tells_an_edit_without_refusing_it(here, says):
    _change(here, "micro_batch_rows = 2", "micro_batch_rows = 1")
    out = says("profile", "verify", "p.toml")
    assert "differs: mind it" in out
    assert "edited by hand" in out


@pytest.mark.parametrize(
    ("old", "new", "code", "field"),
    [
        ("hidden_size = 64", "hidden_size = 32", 6, "model_sha256"),
        ('cpu_model = "', 'cpu_model = "Another ', 0, "cpu_model"),
        ('torch = "', 'torch = "0.', 0, "torch"),
        ('transformers = "', 'transformers = "0.', 0, "transformers"),
    ],
)
def test_what_differs_is_refused_or_told_as_it_matters(here, capsys, old, new, code, field):
    _change(here, old, new)
    assert run(["profile", "verify", "p.toml"]) == code
    out, err = capsys.readouterr()
    assert any(line.startswith(field) and "differs" in line for line in out.splitlines())
    assert (field in err) == bool(code)


def test_another_dataset_is_refused_and_an_absent_one_is_not_checkable(here, says, make_dataset):
    (here / "data").unlink()
    other = make_dataset([[5, 6, 7]]).rename(here / "other")
    assert "dataset_hash" in says("profile", "verify", "p.toml", code=7)
    assert "dataset_hash" in says("profile", "verify", "p.toml", "--data", str(other), code=6)


def test_a_profile_of_a_gpu_is_not_checkable_without_one(here, capsys):
    if NvmlMonitor().devices():
        pytest.skip("this machine has the driver's library")
    _change(here, 'device = "cpu"', 'device = "cuda"')
    _change(here, "gpu_count = 0", 'gpu_count = 1\ngpu_name = "NVIDIA H100"\ngpu_total_bytes = 99')
    assert run(["profile", "verify", "p.toml"]) == 7
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    for field in ("gpu_name", "gpu_total_bytes", "driver", "cuda", "cpu_model", "data_filesystem"):
        assert "not checkable here" in rows[field]
    for field in ("model_sha256", "dataset_hash", "torch"):
        assert "same" in rows[field]


def test_settings_for_another_device_than_the_figures_are_refused(here, says):
    text = (here / "p.toml").read_text()
    (here / "p.toml").write_text(text.replace('device = "cpu"', 'device = "cuda"', 1))
    assert "train.device" in says("profile", "verify", "p.toml", code=6)


def test_verify_holds_the_profile_against_its_ledger_and_an_edit_with_a_new_hash_shows_there(here, says):
    assert "ledger: not checkable here: no trial of it is in its ledger" in says("profile", "verify", "p.toml")
    profile = read_profile(here / "p.toml").profile
    mine = dict(made_on(profile.fingerprint))
    records = [one.model_copy(update={"made_on": MadeOn(**mine)}) for one in records_of_example()]
    rests_on = {"ledger_sha256": ledger_sha256(records), "ledger_until_utc": records[-1].time_utc}
    provenance = profile.provenance.model_copy(update=rests_on)
    _write(here / "p.toml", profile.model_copy(update={"provenance": provenance}))
    ledger = Ledger(here / "reports" / "p" / "ledger", "w")
    for one in records:
        ledger.append(one.model_dump(mode="json", exclude_unset=True))
    assert "ledger: matches: the 8 trials it rests on are as they were; its largest" in says(
        "profile", "verify", "p.toml"
    )
    probe = profile.evidence.probe.model_copy(update={"feasible_max": 64})
    evidence = profile.evidence.model_copy(update={"probe": probe})
    _write(here / "p.toml", profile.model_copy(update={"provenance": provenance, "evidence": evidence}))
    out = says("profile", "verify", "p.toml")
    assert "as written" in out  # whoever edits may write a new hash
    assert "no trial there gave evidence.probe.feasible_max = 64 rows" in out
    ledger.append(records[0].model_dump(mode="json", exclude_unset=True))
    assert json.loads(says("profile", "verify", "p.toml", "--json"))["ledger"]["found"] == "differs"


def test_verify_honours_the_review(here, says):
    verify = ["profile", "verify", "p.toml", "--require-approved"]
    assert "nobody has reviewed" in says(*verify, code=6)
    assert run(["report", "review", "p.toml", "--approve", "--by", "reviewer"]) == 0
    assert run(verify) == 0
    _change(here, "micro_batch_rows = 2", "micro_batch_rows = 1")
    assert run(verify) == 6


def test_explain_gives_all_settings_or_one(here, says):
    out = says("profile", "explain", "p.toml")
    assert "at the trainer's default:" in out
    assert "max_steps = 1000" in out
    out = says("profile", "explain", "p.toml", "data.loader_workers")
    assert "Loader processes per rank" in out
    assert "0.990 (0.985 to 0.995, 98 %), n = 3" in out
    assert "rejected" in out
    assert {one["key"] for one in json.loads(says("profile", "explain", "p.toml", "data", "--json"))} >= {
        "data.path",
        "data.loader_workers",
    }


def test_explain_says_what_an_exploration_found_and_why_each_setting_of_it_is_what_it_is(here, says):
    _write(here / "p.toml", full_example("d"))
    out = says("profile", "explain", "p.toml")
    assert out.count("Tried: 4 of 107 other ways to train") == 1
    out = says("profile", "explain", "p.toml", "layout")
    assert "measured: explored together with other settings of the step" in out
    assert "bucketed: at best 0.910 times the unexplored settings" in out
    assert "Tried: 4 of 107" not in out


def test_explain_suggests_the_nearest_key(here, says):
    assert "'micro_batch_rows'" in says("profile", "explain", "p.toml", "micro_batch_row", code=3)


def test_hostile_words_in_a_profile_steer_nothing(here, says):
    _change(here, 'choice = "because"', 'choice = "\\u001b[31m\\u202ebecause"')
    _change(here, 'created_utc = "2026', 'created_utc = "\\u001b]0;x\\u00072026')
    for command in (["show"], ["explain"], ["explain", "p.toml", "micro_batch_rows"]):
        out = says(*["profile", command[0], "p.toml", *command[2:]])
        assert all(c.isprintable() or c == "\n" for c in out)
