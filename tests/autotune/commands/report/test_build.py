import json

import pytest

from autotune.core.evidence import Evidence
from autotune.core.profile import profile_to_toml
from autotune.search.profiles import read_profile
from tests.autotune.show.report.example_files import write_example


@pytest.fixture
def full_example(here):
    return write_example(here / "work", trials=6)


@pytest.fixture
def example(full_example):
    """Without evidence, so that few charts are drawn."""
    path = full_example[0]
    path.write_text(profile_to_toml(read_profile(path).profile.model_copy(update={"evidence": Evidence()})))
    return full_example


@pytest.fixture
def built(says, here):
    """Build a report, and return its facts and its Markdown."""

    def call(*words):
        says("report", "build", *words, "--out", "a")
        return json.loads((here / "a.json").read_text()), (here / "a.md").read_text()

    return call


def _change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_html_markdown_and_json_lie_beside_each_other_whichever_is_named(full_example, says, here):
    profile, reports, directory = full_example
    found = json.loads(says("report", "build", profile, "--run", directory, "--reports", reports, "--json"))
    place = reports / profile.stem
    assert found == {
        "html": str(place / "report.html"), "markdown": str(place / "report.md"), "json": str(place / "report.json"),
    }  # fmt: skip
    facts = json.loads((place / "report.json").read_text())
    assert [len(facts[name]) for name in ("profiles", "runs")] == [1, 1]
    assert len(facts["profiles"][0]["trials"]) == 6
    assert "# Tuning report: bert-120m" in (place / "report.md").read_text()
    assert "<title>Tuning report: bert-120m</title>" in (place / "report.html").read_text()
    profile.write_text(profile_to_toml(read_profile(profile).profile.model_copy(update={"evidence": Evidence()})))
    for number, name in enumerate(("a.html", "a.md", "a.json", "a", "v1.2")):
        stem = "v1.2" if name == "v1.2" else "a"
        said = says("report", "build", profile, "--out", f"r{number}/{name}")
        assert said.startswith(f"report: r{number}/{stem}.html\n")
        names = sorted(path.name for path in (here / f"r{number}").iterdir())
        assert names == [f"{stem}.html", f"{stem}.json", f"{stem}.md"]


def test_the_dataset_is_found_beside_the_profile_or_named_and_another_is_not_taken_for_it(example, built, here):
    profile = example[0]
    assert built(profile)[0]["profiles"][0]["dataset"]["train_samples"] > 0
    (profile.parent / "data").rename(here / "elsewhere")
    assert "is not a directory" in built(profile)[0]["profiles"][0]["dataset_lacking"]
    assert built(profile, "--data", here / "elsewhere")[0]["profiles"][0]["dataset_lacking"] is None
    _change(here / "elsewhere" / "manifest.json", '"vocab_size": 16384', '"vocab_size": 32768')
    assert "is another dataset" in built(profile, "--data", here / "elsewhere")[1]


def test_a_run_belongs_to_the_profile_whose_hash_or_else_whose_model_it_names(example, built):
    profile, _, directory = example
    facts = built(profile, "--run", directory)[0]
    assert facts["runs"][0]["matched_by"] == "dataset and model"
    _change(directory / "run.json", f'"profile_sha256": "{"0" * 64}"',
            f'"profile_sha256": "{facts["profiles"][0]["content_sha256"]}"')  # fmt: skip
    assert built(profile, "--run", directory)[0]["runs"][0]["matched_by"] == "the profile's hash"
    _change(directory / "run.json", '"name": "bert-120m"', '"name": "other"')
    _change(directory / "run.json", facts["profiles"][0]["content_sha256"], "0" * 64)
    facts, markdown = built(profile, "--run", directory)
    assert facts["runs"][0]["profile"] is None
    assert "nothing was expected of them" in markdown


def test_a_torn_ledger_and_none_make_a_report_that_says_so(example, built):
    profile, reports, _ = example
    assert "the ledger beside this report holds none" in built(profile, "--reports", "nowhere")[1]
    ledger = next((reports / profile.stem / "ledger").glob("*.jsonl"))
    ledger.write_text(ledger.read_text()[:-40])
    said = "Lines of the ledger that could not be read and were left out: 1."
    assert said in built(profile, "--reports", reports)[1]


def test_what_a_file_of_another_version_or_without_sense_holds_is_refused_by_name(full_example, says):
    profile, _, directory = full_example
    _change(directory / "run.json", '"schema_version": 4', '"schema_version": 3')
    assert "schema_version" in says("report", "build", profile, "--run", directory, code=3)
    for old, new, said in (
        ("seconds = 96.0", "seconds = inf", "evidence.baseline.seconds = inf: not a measured figure"),
        ("feasible_max =", "feasible_maximum =", "feasible_max"),
        ("schema_version = 1", "schema_version = 0", "schema version 0"),
    ):
        _change(profile, old, new)
        assert said in says("report", "build", profile, code=3)
        _change(profile, new, old)
