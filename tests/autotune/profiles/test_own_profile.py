"""Profiles of your own training code: file, store, explanation and verification."""

import tomllib

import pytest

from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.profile import Evidence
from autotune.profiles.decide.explain import explanations
from autotune.profiles.decide.follow_up import probe_command, workers_command
from autotune.profiles.decide.trial_log_check import check_trial_log
from autotune.profiles.local_probe import require_local
from autotune.profiles.store import (
    keep_workers,
    known_profile,
    read_profile,
    read_trainer_profile,
    write_profile,
)
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.values import TrialRecord
from testbed.examples.own_profiles import own_profile, probed_only
from testbed.examples.profiles import but
from testbed.examples.trials import MADE_ON, WINDOW_FIGURES
from tests.autotune.profiles.explanations import explain

EXAMPLE = own_profile()
SHOW = ("profile", "show", "mine.toml")


@pytest.fixture
def path(workdir):
    """Return the path of a profile of your own code."""
    path = workdir / "mine.toml"
    write_profile(path, EXAMPLE)
    return path


def with_settings(**settings):
    return EXAMPLE.model_copy(update={"settings": EXAMPLE.settings | settings})


def test_file_keeps_every_table(path):
    stored = read_profile(path)
    assert stored.profile == EXAMPLE
    assert stored.intact
    tables = tomllib.loads(path.read_text())
    assert tables["settings"] == EXAMPLE.settings
    assert "train" not in tables


def test_repeated_probe_keeps_loader_and_workers(path):
    assert keep_workers(probed_only(EXAMPLE), path).settings == EXAMPLE.settings
    kept = keep_workers(probed_only(EXAMPLE), path)
    assert kept.evidence.workers == EXAMPLE.evidence.workers
    assert kept.subject == EXAMPLE.subject


def test_other_size_loses_measured_workers(path):
    kept = keep_workers(probed_only(with_settings(batch=6)), path)
    assert kept.evidence.workers is None
    assert kept.settings == {"batch": 6}


def test_other_source_is_another_profile(path):
    here = EXAMPLE.fingerprint.model_copy(update={"model_sha256": "n"})
    assert known_profile(path, here) is None
    with pytest.raises(ProfileRejected, match="its source have changed") as raised:
        require_local(read_profile(path), here)
    assert "autotune probe --step mine:build_step" in raised.value.next_step


def test_same_source_and_machine_are_known(path):
    assert known_profile(path, EXAMPLE.fingerprint).profile == EXAMPLE
    require_local(read_profile(path), EXAMPLE.fingerprint)


def test_trainer_commands_name_what_they_lack(path):
    with pytest.raises(NotCheckable, match="autotune plan requires") as raised:
        read_trainer_profile(path, "plan")
    assert raised.value.next_step.endswith(f"profile show {path}")


def test_commands_repeat_functions_and_arguments():
    assert probe_command(EXAMPLE, "p.toml") == (
        "autotune probe --step mine:build_step --set seq_length=64 --along batch"
        " --memory 1GiB --out p.toml"
    )
    assert workers_command(EXAMPLE, "p.toml") == (
        "autotune workers p.toml --loader mine:build_loader"
    )


def test_probe_command_names_unit_and_kind():
    changes = {"kind": "lightning", "unit": "tokens", "units_per_size": 512.0}
    command = probe_command(but(EXAMPLE, subject=changes), "p.toml")
    assert "--subject lightning" in command
    assert "--per-size 512tokens" in command


def test_size_is_explained_by_its_evidence():
    explanation = explain(EXAMPLE, "batch")
    assert explanation.origin == "measured"
    assert explanation.rejected == ("9: out of memory",)
    assert [figure.value for figure in explanation.evidence] == [70, 8, 1e9, 2**30]


def test_workers_are_explained_by_their_evidence():
    explanation = explain(EXAMPLE, "settings.num_workers")
    assert explanation.because == "the fewest that keep up"
    assert explanation.rejected[0].startswith("0 workers: 50.0 %")


@pytest.mark.parametrize(("name", "value"), [("batch", 5), ("num_workers", 3)])
def test_edited_setting_is_changed(name, value):
    explanation = explain(with_settings(**{name: value}), name)
    assert explanation.origin == "changed"
    assert "was measured to be the best choice" in explanation.because


def test_setting_without_evidence_is_changed():
    profile = EXAMPLE.model_copy(update={"evidence": Evidence()})
    assert {one.origin for one in explanations(profile)} == {"changed", "requested"}


def test_fixed_argument_is_requested():
    assert explain(EXAMPLE, "seq_length").origin == "requested"


def test_show_names_settings_and_functions(path, says):
    shown = says(*SHOW)
    assert "the largest that fits, 8, less the headroom" in shown
    assert "your code: mine:build_step, mine:build_loader" in shown


def test_show_names_what_was_not_measured(path, says):
    profile = EXAMPLE.model_copy(update={"evidence": Evidence()})
    path.write_text(profile_to_toml(profile))
    shown = says(*SHOW)
    assert "not measured: autotune probe --step" in shown
    assert "not measured: autotune workers --loader" in shown


def test_verify_does_not_claim_the_source(path, says):
    verified = says("profile", "verify", path)
    assert "your code is not imported to check it" in verified
    assert "model_sha256" not in verified


def own_record(job, measured, figures):
    return TrialRecord(
        time_utc="2026-01-01T00:00:00+00:00",
        site="here",
        key="k",
        job=job,
        measured=measured,
        label="trial",
        outcome={"kind": "measured", "figures": figures},
        seconds=1.0,
        made_on={**MADE_ON, "dataset_hash": ""},
    )


def test_rates_of_the_loader_need_trials():
    windows = [
        own_record("window", {}, WINDOW_FIGURES | {"padded_units_per_s": rate})
        for row in EXAMPLE.evidence.workers.rows
        for rate in row.units_per_s
    ]
    assert [
        name
        for name in check_trial_log(EXAMPLE, windows).unfounded
        if "workers" in name
    ] == ["evidence.workers.cached_units_per_s"]


@pytest.mark.parametrize(
    ("tables", "command"),
    [
        (
            'schema_version = 2\n[subject]\nstep = "a:b c"\n',
            "autotune probe --step 'a:b c' --out mine.toml",
        ),
        (
            "schema_version = 2\n[subject]\nstep = 3\n",
            "autotune probe --step MODULE:build_step --out mine.toml",
        ),
        (
            "schema_version = 2\n[train]\nseed = 0\n",
            "autotune tune --model mine.toml --data DIR",
        ),
        ("[other]\n", "autotune tune --model MODEL --data DIR"),
    ],
    ids=["own code", "no step", "trainer", "neither"],
)
def test_older_schema_names_the_new_command(workdir, says, tables, command):
    (workdir / "mine.toml").write_text(tables)
    assert command in says(*SHOW, code=3)
