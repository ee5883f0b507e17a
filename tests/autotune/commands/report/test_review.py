import json
import tomllib

import pytest

from autotune.core.profile import present_sha256

REVIEW = ["report", "review", "p.toml"]
APPROVE = [*REVIEW, "--approve", "--by", "reviewer"]


@pytest.fixture
def kept(here):
    return here / "reports" / "p" / "review.json"


@pytest.fixture
def state(says):
    return lambda: json.loads(says(*REVIEW, "--json"))["standing"]["state"]


def _edit(here):
    text = (here / "p.toml").read_text()
    assert "micro_batch_rows = 2" in text
    (here / "p.toml").write_text(text.replace("micro_batch_rows = 2", "micro_batch_rows = 1"))


def test_the_last_verdict_is_kept_beside_the_report_and_shown(says, state, kept):
    assert "standing: not reviewed" in says(*REVIEW)
    assert not kept.exists()
    out = says(*APPROVE, "--note", "fits the H100s")
    assert "approved by reviewer at 20" in out
    assert "fits the H100s" in out
    found = json.loads(kept.read_text())
    assert (found["verdict"], found["by"], found["note"]) == ("approved", "reviewer", "fits the H100s")
    says(*REVIEW, "--reject", "--by", "another", "--note", "wrong data")
    assert state() == "rejected"
    says(*APPROVE)
    assert state() == "approved"


@pytest.mark.parametrize(
    ("recorded", "intact"), [("none", False), ("zeros", False), ("of what it says now", True), ("no hash", False)]
)
def test_whatever_hash_an_edited_profile_names_its_approval_is_void(here, says, state, recorded, intact):
    before = (here / "p.toml").read_text()
    says(*APPROVE)
    _edit(here)
    text = (here / "p.toml").read_text()
    was, now = tomllib.loads(text)["content_sha256"], present_sha256(tomllib.loads(text), where="p.toml")
    line = {"none": "", "zeros": f'content_sha256 = "{"0" * 64}"', "no hash": 'content_sha256 = "\\u001b[31m"'}
    named = line.get(recorded, f'content_sha256 = "{now}"')
    (here / "p.toml").write_text(edited := text.replace(f'content_sha256 = "{was}"', named))
    told = json.loads(says(*REVIEW, "--json"))
    assert (told["standing"]["state"], told["intact"], told["standing"]["present_sha256"]) == ("voided", intact, now)
    assert "the profile was edited since" in says(*REVIEW)
    says("profile", "verify", "p.toml", "--require-approved", code=6)
    (here / "p.toml").write_text(f"{before}# read twice\n")
    assert state() == "approved"  # what is undone, and a comment, void nothing
    (here / "p.toml").write_text(edited)
    says(*APPROVE, code=0 if intact else 6)  # one who recomputes the hash is not told from autotune


def test_an_edited_profile_is_approved_only_by_saying_so_and_may_be_rejected(here, says, state, kept):
    _edit(here)
    err = says(*APPROVE, code=6)
    assert "edited by hand since autotune wrote it" in err
    assert "--as-edited" in err
    assert not kept.exists()
    assert "approved, as edited by hand by reviewer" in says(*APPROVE, "--as-edited")
    assert state() == "approved"
    says(*REVIEW, "--reject", "--by", "another")
    assert state() == "rejected"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--approve", "--reject", "--by", "reviewer"], 2), (["--by", "reviewer"], 2), (["--note", "x"], 2),
        (["--as-edited"], 2), (["--approve"], 2), (["--reject"], 2), (["--approve", "--by", "x" * 10_000], 3),
        (["--approve", "--by", ""], 3), (["--approve", "--by", " \n "], 3), (["--approve", "--by", "\udcff"], 3),
        (["--approve", "--by", "reviewer", "--note", "x" * 10_000], 3),
        (["--approve", "--by", "reviewer", "--note", "\ud800"], 3),
    ],
)  # fmt: skip
def test_half_a_verdict_and_texts_without_bounds_are_refused(says, kept, options, code):
    assert len(says(*REVIEW, *options, code=code)) < 500
    assert not kept.exists()


def test_hostile_names_are_kept_and_steer_nothing(says, kept):
    name = "\x1b[31mreviewer\u202e\r\n| <script>\0\x07"
    says(*REVIEW, "--approve", "--by", name, "--note", "\x1b]0;x\x07\nstanding: rejected")
    out = says(*REVIEW)
    assert all(c.isprintable() or c == "\n" for c in out)
    assert not any(line.startswith("standing: rejected") for line in out.splitlines())
    text = kept.read_text()
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
def test_a_damaged_review_file_is_refused_and_left_alone(says, kept, text, words):
    kept.parent.mkdir(parents=True)
    kept.write_bytes(text.encode("latin-1"))
    for command in (REVIEW, APPROVE):
        assert words in says(*command, code=3)
    assert kept.read_bytes() == text.encode("latin-1")
