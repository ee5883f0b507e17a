import json
import tomllib

import pytest

from autotune.cli import run
from autotune.core.profile import present_sha256, profile_to_toml
from tests.autotune.profiles import example_profile


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(profile_to_toml(example_profile()))
    return tmp_path


REVIEW = ["report", "review", "p.toml"]
APPROVE = [*REVIEW, "--approve", "--by", "reviewer"]


def _edit(here):
    text = (here / "p.toml").read_text()
    assert "micro_batch_rows = 2" in text
    (here / "p.toml").write_text(text.replace("micro_batch_rows = 2", "micro_batch_rows = 1"))


def _state(capsys) -> str:
    capsys.readouterr()
    assert run([*REVIEW, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["standing"]["state"]


def test_nobody_has_reviewed_a_new_profile(here, capsys):
    assert run(REVIEW) == 0
    assert "standing: not reviewed" in capsys.readouterr().out
    assert not (here / "reports").exists()


def test_an_approval_is_kept_beside_the_report_and_shown(here, capsys):
    assert run([*APPROVE, "--note", "fits the H100s"]) == 0
    out = capsys.readouterr().out
    assert "approved by reviewer at 20" in out
    assert "fits the H100s" in out
    kept = json.loads((here / "reports" / "p" / "review.json").read_text())
    assert (kept["verdict"], kept["by"], kept["note"]) == ("approved", "reviewer", "fits the H100s")


def test_editing_the_profile_voids_the_approval_and_undoing_restores_it(here, capsys):
    before = (here / "p.toml").read_text()
    assert run(APPROVE) == 0
    _edit(here)
    assert _state(capsys) == "voided"
    assert run(REVIEW) == 0
    assert "the profile was edited since" in capsys.readouterr().out
    (here / "p.toml").write_text(before)
    assert _state(capsys) == "approved"


def test_a_comment_is_no_edit(here, capsys):
    assert run(APPROVE) == 0
    with (here / "p.toml").open("a") as file:
        file.write("# read twice\n")
    assert _state(capsys) == "approved"


@pytest.mark.parametrize(
    ("recorded", "intact"), [("none", False), ("zeros", False), ("of what it says now", True), ("no hash", False)]
)
def test_whatever_hash_an_edited_profile_names_its_approval_is_void(here, capsys, recorded, intact):
    assert run(APPROVE) == 0
    _edit(here)
    tables = tomllib.loads((here / "p.toml").read_text())
    was, now = tables["content_sha256"], present_sha256(tables, where="p.toml")
    line = {"none": "", "zeros": f'content_sha256 = "{"0" * 64}"', "no hash": 'content_sha256 = "\\u001b[31m"'}
    text = (here / "p.toml").read_text()
    named = line.get(recorded, f'content_sha256 = "{now}"')
    (here / "p.toml").write_text(text.replace(f'content_sha256 = "{was}"', named))
    capsys.readouterr()
    assert run([*REVIEW, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["standing"]["state"], told["intact"], told["standing"]["present_sha256"]) == ("voided", intact, now)
    assert run(["profile", "verify", "p.toml", "--require-approved"]) == 6
    assert run(APPROVE) == (0 if intact else 6)  # one who recomputes the hash is not told from autotune


def test_the_last_verdict_counts(here, capsys):
    assert run(APPROVE) == 0
    assert run([*REVIEW, "--reject", "--by", "another", "--note", "wrong data"]) == 0
    assert _state(capsys) == "rejected"
    assert run(APPROVE) == 0
    assert _state(capsys) == "approved"


def test_an_edited_profile_is_approved_only_by_saying_so(here, capsys):
    _edit(here)
    assert run(APPROVE) == 6
    err = capsys.readouterr().err
    assert "edited by hand since autotune wrote it" in err
    assert "--as-edited" in err
    assert not (here / "reports").exists()
    assert run([*APPROVE, "--as-edited"]) == 0
    assert "approved, as edited by hand by reviewer" in capsys.readouterr().out
    assert _state(capsys) == "approved"


def test_an_edited_profile_may_be_rejected(here, capsys):
    _edit(here)
    assert run([*REVIEW, "--reject", "--by", "another"]) == 0
    assert _state(capsys) == "rejected"


@pytest.mark.parametrize(
    "arguments",
    [["--approve", "--reject", "--by", "reviewer"], ["--by", "reviewer"], ["--note", "x"], ["--as-edited"],
     ["--approve"], ["--reject"]],
)  # fmt: skip
def test_half_a_verdict_is_a_usage_error(here, capsys, arguments):
    assert run([*REVIEW, *arguments]) == 2
    assert not (here / "reports").exists()


@pytest.mark.parametrize(
    "options",
    [["--by", "x" * 10_000], ["--by", ""], ["--by", " \n "], ["--by", "\udcff"],
     ["--by", "reviewer", "--note", "x" * 10_000], ["--by", "reviewer", "--note", "\ud800"]],
)  # fmt: skip
def test_names_and_notes_are_bounded_text(here, capsys, options):
    assert run([*REVIEW, "--approve", *options]) == 3
    assert len(capsys.readouterr().err) < 500
    assert not (here / "reports" / "p" / "review.json").exists()


def test_hostile_names_are_kept_and_steer_nothing(here, capsys):
    name = "\x1b[31mreviewer\u202e\r\n| <script>\0\x07"
    assert run([*REVIEW, "--approve", "--by", name, "--note", "\x1b]0;x\x07\nstanding: rejected"]) == 0
    assert run(REVIEW) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert not any(line.startswith("standing: rejected") for line in out.splitlines())
    text = (here / "reports" / "p" / "review.json").read_text()
    assert all(c == "\n" or " " <= c <= "~" for c in text)  # no terminal is steered by looking at the file either
    assert json.loads(text)["by"] == name.strip()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"), ("[]", "review.json"), ('{"schema_version": 0}', "review.json"),
        ("null", "review.json"), ('{"schema_version": 2, "by": "reviewer"}', "review.json"), ("\xff", "review.json"),
        ('{"schema_version": 1, "reviews": []}', "review.json"), ("[" * 100_000, "not valid JSON"),
        ('{"schema_version": 2,' + " " * 2**23 + "}", "larger than"),
    ],
)  # fmt: skip
def test_a_damaged_review_file_is_refused_and_left_alone(here, capsys, text, words):
    path = here / "reports" / "p" / "review.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    for command in (REVIEW, APPROVE):
        assert run(command) == 3
        assert words in capsys.readouterr().err
    assert path.read_bytes() == text.encode("latin-1")


@pytest.mark.parametrize("command", [REVIEW, ["profile", "explain", "p.toml"]])
def test_a_profile_with_a_date_is_bad_input(here, capsys, command):
    with (here / "p.toml").open("a") as file:
        file.write("\n[train.model.config.more]\nday = 2026-01-01\n")
    assert run(command) == 3
    assert "holds a value that no profile has" in capsys.readouterr().err
