import json
import tomllib

import pytest

from autotune.evidence.profile import Evidence
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import present_sha256, profile_to_toml
from testbed.examples.tuning_files import write_example


@pytest.fixture
def full_example(workdir):
    return write_example(workdir / "work", trials=6)


@pytest.fixture
def example(full_example):
    """The example without evidence, so that few charts are drawn."""
    path = full_example[0]
    path.write_text(
        profile_to_toml(
            read_profile(path).profile.model_copy(update={"evidence": Evidence()})
        )
    )
    return full_example


@pytest.fixture
def built(says, workdir):
    """Return a function that builds a report and returns its facts and Markdown."""

    def call(*words):
        says("report", *words, "--out", "a")
        return json.loads((workdir / "a.json").read_text()), (
            workdir / "a.md"
        ).read_text()

    return call


def _change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_writes_three_formats_beside_each_other(full_example, says, workdir):
    profile, reports, directory = full_example
    printed = json.loads(
        says("report", profile, "--run", directory, "--reports", reports, "--json")
    )
    report_directory = reports / profile.stem
    formats = ("html", "markdown", "json")
    assert {name: printed[name] for name in formats} == {
        "html": str(report_directory / "report.html"),
        "markdown": str(report_directory / "report.md"),
        "json": str(report_directory / "report.json"),
    }
    facts = json.loads((report_directory / "report.json").read_text())
    assert [len(facts[name]) for name in ("profiles", "runs")] == [1, 1]
    assert len(facts["profiles"][0]["trials"]) == 6
    assert "# Tuning report: bert-120m" in (report_directory / "report.md").read_text()
    assert (
        "<title>Tuning report: bert-120m</title>"
        in (report_directory / "report.html").read_text()
    )


def test_out_may_name_any_format(full_example, says, workdir):
    profile, _, _ = full_example
    profile.write_text(
        profile_to_toml(
            read_profile(profile).profile.model_copy(update={"evidence": Evidence()})
        )
    )
    for number, name in enumerate(("a.html", "a.md", "a.json", "a", "v1.2")):
        stem = "v1.2" if name == "v1.2" else "a"
        assert says("report", profile, "--out", f"r{number}/{name}").startswith(
            f"report: r{number}/{stem}.html\n"
        )
        names = sorted(path.name for path in (workdir / f"r{number}").iterdir())
        assert names == [f"{stem}.html", f"{stem}.json", f"{stem}.md"]


def test_finds_dataset_beside_the_profile(example, built, workdir):
    profile = example[0]
    assert built(profile)[0]["profiles"][0]["dataset"]["train_samples"] > 0
    (profile.parent / "data").rename(workdir / "elsewhere")
    assert "dataset not found" in built(profile)[0]["profiles"][0]["dataset_lacking"]
    assert (
        built(profile, "--data", workdir / "elsewhere")[0]["profiles"][0][
            "dataset_lacking"
        ]
        is None
    )


def test_rejects_another_dataset(example, built, workdir):
    profile = example[0]
    (profile.parent / "data").rename(workdir / "elsewhere")
    _change(
        workdir / "elsewhere" / "manifest.json",
        '"vocab_size": 16384',
        '"vocab_size": 32768',
    )
    assert "is another dataset" in built(profile, "--data", workdir / "elsewhere")[1]


def test_run_is_matched_by_profile_hash(example, built):
    profile, _, directory = example
    facts = built(profile, "--run", directory)[0]
    assert facts["runs"][0]["matched_by"] == "dataset and model"
    _change(
        directory / "run.json",
        f'"profile_sha256": "{"0" * 64}"',
        f'"profile_sha256": "{facts["profiles"][0]["content_sha256"]}"',
    )
    assert (
        built(profile, "--run", directory)[0]["runs"][0]["matched_by"]
        == "the profile's hash"
    )


def test_unrelated_run_is_not_matched(example, built):
    profile, _, directory = example
    _change(directory / "run.json", '"name": "bert-120m"', '"name": "other"')
    facts, markdown = built(profile, "--run", directory)
    assert facts["runs"][0]["profile"] is None
    assert "Expected and achieved" not in markdown


def test_torn_trial_log_is_reported(example, built):
    profile, reports, _ = example
    assert "Trials (none in the trial log)" in built(profile, "--reports", "nowhere")[1]
    trial_log = next((reports / profile.stem / "trials").glob("*.jsonl"))
    trial_log.write_text(trial_log.read_text()[:-40])
    assert (
        "Unreadable lines of the trial log, ignored: 1."
        in built(profile, "--reports", reports)[1]
    )


def test_unusable_file_is_named(full_example, says):
    profile, _, directory = full_example
    _change(directory / "run.json", '"schema_version": 5', '"schema_version": 4')
    assert "schema_version" in says("report", profile, "--run", directory, code=3)
    _change(profile, "seconds = 96.0", "seconds = inf")
    assert "evidence.baseline.seconds = inf: the number must be finite" in says(
        "report", profile, code=3
    )


REVIEW = ["profile", "approve", "p.toml"]
APPROVE = [*REVIEW, "--by", "reviewer"]


@pytest.fixture
def kept(workdir):
    return workdir / "reports" / "p" / "review.json"


@pytest.fixture
def state(says):
    return lambda: json.loads(says(*REVIEW, "--json"))["approval"]["state"]


def test_keeps_the_last_decision(says, state, kept):
    assert "approval: not reviewed" in says(*REVIEW)
    assert not kept.exists()
    out = says(*APPROVE, "--note", "fits the H100s")
    assert "approved by reviewer at 20" in out
    assert "fits the H100s" in out
    review = json.loads(kept.read_text())
    assert (review["decision"], review["by"], review["note"]) == (
        "approved",
        "reviewer",
        "fits the H100s",
    )
    says(*REVIEW, "--reject", "--by", "another", "--note", "wrong data")
    assert state() == "rejected"
    says(*APPROVE)
    assert state() == "approved"


@pytest.mark.parametrize(
    ("recorded", "intact"),
    [("none", False), ("zeros", False), ("new", True), ("no hash", False)],
)
def test_edited_profile_voids_approval(workdir, says, state, recorded, intact):
    before = (workdir / "p.toml").read_text()
    says(*APPROVE)
    _change(workdir / "p.toml", "micro_batch_size = 2", "micro_batch_size = 1")
    text = (workdir / "p.toml").read_text()
    recorded_hash = tomllib.loads(text)["content_sha256"]
    present_hash = present_sha256(tomllib.loads(text), where="p.toml")
    line = {
        "none": "",
        "zeros": f'content_sha256 = "{"0" * 64}"',
        "no hash": 'content_sha256 = "\\u001b[31m"',
    }
    hash_line = line.get(recorded, f'content_sha256 = "{present_hash}"')
    (workdir / "p.toml").write_text(
        edited := text.replace(f'content_sha256 = "{recorded_hash}"', hash_line)
    )
    printed = json.loads(says(*REVIEW, "--json"))
    assert (
        printed["approval"]["state"],
        printed["intact"],
        printed["approval"]["present_sha256"],
    ) == ("voided", intact, present_hash)
    assert "modified since (hash" in says(*REVIEW)
    says("profile", "verify", "p.toml", "--require-approved", code=6)
    (workdir / "p.toml").write_text(f"{before}# read twice\n")
    assert state() == "approved"  # what is undone, and a comment, void nothing
    (workdir / "p.toml").write_text(edited)
    # A recomputed hash cannot be told from one that autotune wrote.
    says(*APPROVE, code=0 if intact else 6)


def test_edited_profile_is_approved_explicitly(workdir, says, state, kept):
    _change(workdir / "p.toml", "micro_batch_size = 2", "micro_batch_size = 1")
    err = says(*APPROVE, code=6)
    assert "p.toml was modified after measurement" in err
    assert "--as-edited" in err
    assert not kept.exists()
    assert "approved (modified content) by reviewer" in says(*APPROVE, "--as-edited")
    assert state() == "approved"
    says(*REVIEW, "--reject", "--by", "another")
    assert state() == "rejected"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--note", "x"], 2),
        (["--as-edited"], 2),
        (["--reject"], 2),
        (["--by", "x" * 10_000], 3),
        (["--by", ""], 3),
        (["--by", " \n "], 3),
        (["--by", "\udcff"], 3),
        (["--by", "reviewer", "--note", "x" * 10_000], 3),
        (["--by", "reviewer", "--note", "\ud800"], 3),
    ],
)
def test_rejects_incomplete_reviews(says, kept, options, code):
    assert len(says(*REVIEW, *options, code=code)) < 500
    assert not kept.exists()


def test_hostile_reviewer_cannot_steer_the_terminal(says, kept):
    name = "\x1b[31mreviewer\u202e\r\n| <script>\0\x07"
    says(*REVIEW, "--by", name, "--note", "\x1b]0;x\x07\napproval: rejected")
    out = says(*REVIEW)
    assert all(c.isprintable() or c == "\n" for c in out)
    assert not any(line.startswith("approval: rejected") for line in out.splitlines())
    text = kept.read_text()
    # No terminal is steered by looking at the file either.
    assert all(c == "\n" or " " <= c <= "~" for c in text)
    assert json.loads(text)["by"] == name.strip()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "review.json"),
        ('{"schema_version": 0}', "review.json"),
        ("null", "review.json"),
        ('{"schema_version": 2, "by": "reviewer"}', "review.json"),
        ("\xff", "review.json"),
        ('{"schema_version": 1, "reviews": []}', "review.json"),
        ("[" * 100_000, "not valid JSON"),
        ('{"schema_version": 2,' + " " * 2**23 + "}", "exceeds the limit"),
    ],
    ids=[
        "empty",
        "list",
        "old version",
        "null",
        "missing fields",
        "not UTF-8",
        "earlier version",
        "nested too deep",
        "too large",
    ],
)
def test_damaged_review_file_is_left_alone(says, kept, text, words):
    kept.parent.mkdir(parents=True)
    kept.write_bytes(text.encode("latin-1"))
    for command in (REVIEW, APPROVE):
        assert words in says(*command, code=3)
    assert kept.read_bytes() == text.encode("latin-1")
