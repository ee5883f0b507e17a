import json

import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import AutotuneError, BadInput
from autotune.tuning.report import build_report
from tests.autotune.profiles import example_profile
from trainer.errors import TrainerError


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p" / "tiny-cpu.toml"
    path.parent.mkdir()
    path.write_text(profile_to_toml(example_profile()))
    return path


def test_the_three_forms_lie_beside_each_other_and_carry_the_same_profile(profile, tmp_path):
    out = tmp_path / "r" / "tiny-cpu" / "report.html"
    places = build_report([profile], tmp_path / "r", out)
    assert {name: path.name for name, path in places.items()} == {
        "html": "report.html", "markdown": "report.md", "json": "report.json",
    }  # fmt: skip
    assert all(path.parent == out.parent and path.is_file() for path in places.values())
    facts = json.loads(places["json"].read_text())
    assert facts["profiles"][0]["profile"]["train"]["model"]["name"] == "tiny"
    assert "tiny" in places["html"].read_text()
    assert "tiny" in places["markdown"].read_text()


def test_profiles_of_several_models_are_one_report(profile, tmp_path):
    other = profile.with_name("other-cpu.toml")
    other.write_text(profile.read_text())
    places = build_report([profile, other], tmp_path / "r", tmp_path / "r" / "both")
    assert places["html"].name == "both.html"
    assert len(json.loads(places["json"].read_text())["profiles"]) == 2


def test_a_report_is_written_anew_over_an_older_one(profile, tmp_path):
    out = tmp_path / "r" / "report.html"
    build_report([profile], tmp_path / "r", out)
    profile.write_text(profile.read_text().replace('name = "tiny"', 'name = "teeny"'))
    build_report([profile], tmp_path / "r", out)
    assert "teeny" in out.with_suffix(".md").read_text()
    assert sorted(path.name for path in out.parent.glob("report*")) == ["report.html", "report.json", "report.md"]


def test_a_profile_that_is_not_there_is_said(tmp_path):
    with pytest.raises((AutotuneError, TrainerError), match="absent"):
        build_report([tmp_path / "absent.toml"], tmp_path / "r", tmp_path / "r" / "report.html")


def test_a_place_that_cannot_be_written_is_said(profile, tmp_path):
    (tmp_path / "r").write_text("a file")
    with pytest.raises((BadInput, NotADirectoryError)):
        build_report([profile], tmp_path / "reports", tmp_path / "r" / "report.html")
