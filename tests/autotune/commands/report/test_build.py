import json

import pytest

from autotune.cli import run
from autotune.core.evidence import Evidence
from autotune.core.profile import profile_to_toml
from autotune.search.profiles import read_profile
from tests.autotune.show.report.example_files import write_example


@pytest.fixture
def full_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    return write_example(tmp_path / "work", trials=6)


@pytest.fixture
def example(full_example):
    """Without evidence, so that few charts are drawn."""
    path = full_example[0]
    path.write_text(profile_to_toml(read_profile(path).profile.model_copy(update={"evidence": Evidence()})))
    return full_example


def build(capsys, *words, code=0):
    assert run(["report", "build", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_html_markdown_and_json_lie_beside_each_other(full_example, capsys):
    profile, reports, directory = full_example
    found = json.loads(build(capsys, profile, "--run", directory, "--reports", reports, "--json"))
    place = reports / profile.stem
    assert found == {
        "html": str(place / "report.html"),
        "markdown": str(place / "report.md"),
        "json": str(place / "report.json"),
    }
    facts = json.loads((place / "report.json").read_text())
    assert [len(facts[name]) for name in ("profiles", "runs")] == [1, 1]
    assert len(facts["profiles"][0]["trials"]) == 6
    assert "# Tuning report: bert-120m" in (place / "report.md").read_text()
    assert "<title>Tuning report: bert-120m</title>" in (place / "report.html").read_text()


@pytest.mark.parametrize("out", ["r/a.html", "r/a.md", "r/a.json", "r/a", "r/v1.2"])
def test_whichever_of_the_three_is_named_the_others_lie_beside_it(example, capsys, out, tmp_path):
    build(capsys, example[0], "--reports", example[1], "--out", out)
    name = "v1.2" if out.endswith("2") else "a"
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [f"{name}.html", f"{name}.json", f"{name}.md"]


def test_people_are_told_where_to_look(example, capsys):
    out = build(capsys, example[0], "--reports", example[1])
    assert out.startswith(f"report: {example[1] / example[0].stem / 'report.html'}\n")


def test_the_dataset_is_found_beside_the_profile_or_named(example, capsys, tmp_path):
    profile = example[0]
    build(capsys, profile, "--out", "a")
    assert json.loads((tmp_path / "a.json").read_text())["profiles"][0]["dataset"]["train_samples"] > 0
    (profile.parent / "data").rename(tmp_path / "elsewhere")
    build(capsys, profile, "--out", "b")
    assert "is not a directory" in json.loads((tmp_path / "b.json").read_text())["profiles"][0]["dataset_lacking"]
    build(capsys, profile, "--data", tmp_path / "elsewhere", "--out", "c")
    assert json.loads((tmp_path / "c.json").read_text())["profiles"][0]["dataset_lacking"] is None


def test_another_dataset_is_not_taken_for_the_profiles(example, capsys, tmp_path):
    manifest = example[0].parent / "data" / "manifest.json"
    tables = json.loads(manifest.read_text())
    tables["vocab_size"] = 32_768
    manifest.write_text(json.dumps(tables))
    build(capsys, example[0], "--out", "a")
    assert "is another dataset" in (tmp_path / "a.md").read_text()


def test_a_run_belongs_to_the_profile_whose_hash_it_names(example, capsys, tmp_path):
    profile, _, directory = example
    build(capsys, profile, "--run", directory, "--out", "a")
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["runs"][0]["matched_by"] == "dataset and model"
    header = json.loads((directory / "run.json").read_text())
    header["profile_sha256"] = facts["profiles"][0]["content_sha256"]
    (directory / "run.json").write_text(json.dumps(header))
    build(capsys, profile, "--run", directory, "--out", "a")
    assert json.loads((tmp_path / "a.json").read_text())["runs"][0]["matched_by"] == "the profile's hash"


def test_a_run_of_another_model_belongs_to_none(example, capsys, tmp_path):
    profile, _, directory = example
    header = json.loads((directory / "run.json").read_text()) | {"name": "other"}
    (directory / "run.json").write_text(json.dumps(header))
    build(capsys, profile, "--run", directory, "--out", "a")
    assert json.loads((tmp_path / "a.json").read_text())["runs"][0]["profile"] is None
    assert "nothing was expected of them" in (tmp_path / "a.md").read_text()


def test_a_torn_ledger_makes_a_report_that_says_so(example, capsys):
    profile, reports, _ = example
    ledger = next((reports / profile.stem / "ledger").glob("*.jsonl"))
    ledger.write_text(ledger.read_text()[:-40])
    build(capsys, profile, "--reports", reports)
    text = (reports / profile.stem / "report.md").read_text()
    assert "Lines of the ledger that could not be read and were left out: 1." in text


def test_without_a_ledger_there_is_a_report(example, capsys, tmp_path):
    build(capsys, example[0], "--reports", "nowhere", "--out", "a")
    assert "the ledger beside this report holds none" in (tmp_path / "a.md").read_text()


def test_profiles_and_runs_of_other_versions_are_refused(example, capsys):
    profile, _, directory = example
    (directory / "run.json").write_text(
        (directory / "run.json").read_text().replace('"schema_version": 4', '"schema_version": 3')
    )
    assert "schema_version" in build(capsys, profile, "--run", directory, code=3)
    profile.write_text(profile.read_text().replace("schema_version = 1", "schema_version = 0"))
    assert "schema version 0" in build(capsys, profile, code=3)


def test_evidence_of_another_version_is_refused_by_name(full_example, capsys):
    profile = full_example[0]
    profile.write_text(profile.read_text().replace("feasible_max =", "feasible_maximum ="))
    assert "feasible_max" in build(capsys, profile, code=3)


def test_wrong_turns_are_told(example, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for words, code, said in (
        ([], 2, "profile"),
        (["absent.toml"], 3, "cannot read absent.toml"),
        ([example[0], "--run", tmp_path], 3, "is not a run"),
        ([example[0], "--out", "file/report.html"], 3, "cannot write"),
    ):
        assert said in build(capsys, *words, code=code)


def test_an_infinite_figure_is_refused_by_its_key(full_example, capsys):
    profile = full_example[0]
    profile.write_text(profile.read_text().replace("seconds = 96.0", "seconds = inf"))
    assert "evidence.baseline.seconds = inf: not a measured figure" in build(capsys, profile, code=3)
