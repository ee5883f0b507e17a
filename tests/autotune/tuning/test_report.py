import json

import pytest

from autotune.core.profile import profile_to_toml
from autotune.tuning.report import build_report
from tests.autotune.profiles import example_profile


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p" / "tiny-cpu.toml"
    path.parent.mkdir()
    path.write_text(profile_to_toml(example_profile()))
    return path


def test_profiles_of_several_models_are_one_report_which_is_written_over_an_older_one(profile, tmp_path):
    other, out = profile.with_name("other-cpu.toml"), tmp_path / "r" / "both"
    other.write_text(profile.read_text())
    build_report([profile], tmp_path / "r", out)
    profile.write_text(profile.read_text().replace('name = "tiny"', 'name = "teeny"'))
    places = build_report([profile, other], tmp_path / "r", out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["both.html", "both.json", "both.md"]
    assert len(json.loads(places["json"].read_text())["profiles"]) == 2
    assert "teeny" in places["markdown"].read_text()
