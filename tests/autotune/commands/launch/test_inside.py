import re

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile
from trainer.dataset import read_manifest
from trainer.record import code_sha256
from trainer.resolve import profile_sha256, read_profile_tables


@pytest.fixture
def preflight(tmp_path, monkeypatch, patterned_dataset):
    """The command on a node that fits."""
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    found = example_profile()
    there = found.fingerprint.model_copy(update={"dataset_hash": read_manifest(patterned_dataset).dataset_hash})
    (tmp_path / "p.toml").write_text(profile_to_toml(found.model_copy(update={"fingerprint": there})))
    return ["launch", "preflight", "--profile", str(tmp_path / "p.toml"), "--data", str(patterned_dataset),
            "--ranks", "1", "--cpus", "1", "--code", code_sha256()]  # fmt: skip


def test_a_node_that_fits_says_so_on_one_line(preflight, says):
    out = says(*preflight)
    assert out.startswith("preflight: n7: ")
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "field"), [("--code", "0" * 64, "code"), ("--data", ".", "dataset"), ("--cpus", "4096", "cpus")]
)
def test_a_node_that_does_not_fit_is_refused_by_name(preflight, says, option, value, field):
    preflight[preflight.index(option) + 1] = value
    err = says(*preflight, code=6)
    assert "error: n7: " in err
    assert field in err


def test_an_unknown_interface_is_refused_and_a_node_has_an_address(says):
    assert "network.interface" in says("launch", "address", "--interface", "none9", code=5)
    here, port = says("launch", "meet", "--job", "12").strip().split(":")
    assert re.fullmatch(re.escape(here) + r" \S+", says("launch", "address").strip())
    assert 20000 <= int(port) < 30000


def test_the_scripts_own_commands_are_not_in_the_way_of_people(says):
    out = says("launch", "--help")
    assert "status" in out
    assert "preflight" not in out
    assert "ended" not in out


def test_a_profile_that_was_edited_while_its_job_waited_is_refused_on_the_node(preflight, says, tmp_path):
    profile, reports = tmp_path / "p.toml", str(tmp_path / "reports")
    preflight += ["--require-approved", "--reports", reports]
    assert "nobody has reviewed" in says(*preflight, code=6)
    assert run(["report", "review", str(profile), "--approve", "--by", "reviewer", "--reports", reports]) == 0
    assert run(preflight) == 0
    profile.write_text(profile.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 1"))
    assert "not approved any more" in says(*preflight, code=6)


def test_a_profile_that_was_reviewed_anew_while_its_job_waited_is_another_one(preflight, says, tmp_path):
    profile, reports = tmp_path / "p.toml", str(tmp_path / "reports")
    approve = ["report", "review", str(profile), "--approve", "--by", "reviewer", "--reports", reports, "--as-edited"]
    said = profile_sha256(read_profile_tables(profile))
    preflight += ["--require-approved", "--reports", reports, "--profile-sha256", said]
    assert run(approve) == 0
    assert run(preflight) == 0
    profile.write_text(profile.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 1"))
    assert run(approve) == 0
    assert "this job was written for what it said before" in says(*preflight, code=6)
