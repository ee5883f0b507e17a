"""A profile that tests resolve."""

from pathlib import Path

import pytest

from tests.trainer.config.profile_file import PROFILE


@pytest.fixture
def profile(tmp_path) -> Path:
    path = tmp_path / "profiles" / "p.toml"
    path.parent.mkdir()
    path.write_text(PROFILE)
    return path
