"""Profiles that were modified after they were tuned, as their hashes show."""

import datetime
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.trainer.config.profile_file import PROFILE
from trainer.config.resolve import resolve
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import ProfileMismatch
from trainer.formats.profile_file import is_modified

HASH_OF_PROFILE = canonical_sha256(tomllib.loads(PROFILE))
OTHER_HASH = "0" * 64


@pytest.fixture
def run_trainer(profile):
    """Function that runs the trainer on the profile in a process of its own."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "trainer", profile, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def test_profile_hash_ignores_assignments(profile):
    plain = resolve(profile, environment={"AUTOTUNE_DATA": "d"})
    changed = resolve(
        profile,
        assignments=["train.max_steps=7"],
        data=Path("d"),
        expect_sha256=plain.profile_sha256,
    )
    assert changed.profile_sha256 == plain.profile_sha256
    assert changed.config_sha256 != plain.config_sha256


def test_profile_hash_ignores_comments(profile):
    sha256 = resolve(profile, data=Path("d")).profile_sha256
    profile.write_text(f"# a comment\n{PROFILE}")
    commented = resolve(profile, data=Path("d"), expect_sha256=sha256)
    assert commented.profile_sha256 == sha256


def test_rejects_modified_profile(profile):
    sha256 = resolve(profile, data=Path("d")).profile_sha256
    profile.write_text(PROFILE.replace("0.001", "0.002"))
    with pytest.raises(ProfileMismatch, match=f"expected {sha256[:12]}"):
        resolve(profile, data=Path("d"), expect_sha256=sha256)


def test_trainer_rejects_modified_profile_before_it_writes(run_trainer, tmp_path):
    out = tmp_path / "run"
    process = run_trainer(
        "--data", "d", "--out", out, "--expect-profile-sha256", OTHER_HASH
    )
    assert process.returncode == ProfileMismatch.exit_code
    assert "was modified" in process.stderr
    assert "  next: " in process.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        pytest.param(HASH_OF_PROFILE, False, id="its hash"),
        pytest.param(OTHER_HASH, True, id="another hash"),
        pytest.param(3, True, id="a number"),
    ],
)
def test_recorded_hash_tells_whether_profile_was_modified(profile, recorded, expected):
    profile.write_text(f"content_sha256 = {json.dumps(recorded)}\n{PROFILE}")
    resolved = resolve(profile, assignments=["train.seed=3"], environment={})
    assert resolved.profile_modified == expected


def test_profile_written_by_hand_is_not_modified(profile):
    resolved = resolve(profile, assignments=["train.seed=3"], environment={})
    assert not resolved.profile_modified


def test_date_in_a_profile_is_a_modification():
    # Dates have no JSON form, so that the profile cannot be hashed as it was written.
    assert is_modified(
        {"content_sha256": OTHER_HASH, "date": datetime.date(2026, 1, 1)}
    )


def test_trainer_warns_once_of_a_modified_profile(profile, run_trainer, tmp_path):
    profile.write_text(f'content_sha256 = "{OTHER_HASH}"\n{PROFILE}')
    process = run_trainer("--data", tmp_path / "none")
    warning, error, *other_lines = process.stderr.splitlines()
    assert warning.startswith(f"warning: {profile} was modified after it was tuned")
    # The warning ended nothing: the trainer has looked for its dataset.
    assert "dataset not found" in error
    assert not any("modified" in line for line in (error, *other_lines))
