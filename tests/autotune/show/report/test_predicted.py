"""Reports of profiles that nobody measured."""

import pytest

from autotune.core.verification import LedgerCheck
from autotune.show.report.build import report_document
from autotune.show.report.document import Chart, Missing, blocks_of
from autotune.show.report.facts import report_facts
from autotune.show.report.html import report_html
from autotune.show.report.markdown import report_markdown
from autotune.show.report.origin import commands
from tests.autotune.profiles import estimated_profile
from tests.autotune.show.report.examples import Page, reported, reported_run

UNTRIED = LedgerCheck(found="not measured", trials=0, added=0, others=0, unfounded=())
ESTIMATED = reported("profiles/e.toml", estimated_profile(), ledger=UNTRIED)


def text_of(*profiles, runs=()):
    return report_markdown(report_document(profiles, runs))


def test_the_first_sentence_is_that_nothing_was_measured():
    title, said, *_ = text_of(ESTIMATED).split("\n\n")
    assert title == "# Estimate: bert-120m"
    assert said.startswith("Nothing in this report was measured. It is an estimate for NVIDIA H100 NVL")
    page = Page(report_html(report_document((ESTIMATED,), ())))
    assert "Nothing in this report was measured" in page.text
    assert "measured unless they are called predicted" not in page.text


def test_runs_are_measured_all_the_same():
    assert "Nothing in this report was measured but what training runs recorded" in text_of(
        ESTIMATED, runs=(reported_run(),)
    )


def test_beside_measured_profiles_the_estimated_one_is_named():
    said = text_of(ESTIMATED, reported("profiles/m.toml")).split("\n\n")[1]
    assert said.startswith("A CPU, torch 2.13.0")
    assert "Nothing of e was measured: it is an estimate." in said
    assert "403 (predicted)" in text_of(ESTIMATED, reported("profiles/m.toml"))


def test_what_is_predicted_is_called_so_and_has_its_ledger():
    document = report_document((ESTIMATED,), ())
    text = report_markdown(document)
    assert "**micro-batch 403 rows** (predicted, not probed)" in text
    assert "What should fit (predicted; nothing was measured)" in text
    assert "| with all that is assumed at its most | 416 rows |" in text
    (chart,) = [block for block in blocks_of(document) if isinstance(block, Chart)]
    assert [stack.label for stack in chart.drawing.stacks] == ["predicted"]
    assert "Not measured." in chart.description


def test_a_probe_comes_before_everything_that_would_be_refused_without_one():
    document = report_document((ESTIMATED,), ())
    probe = "autotune probe --model bert-120m --data DIR --out profiles/e.toml --ranks 2"
    missing = [block for block in blocks_of(document) if isinstance(block, Missing)]
    for command in ("baseline", "workers", "network"):
        (block,) = [one for one in missing if one.commands[-1].startswith(f"autotune {command} ")]
        assert block.commands[0] == probe
    assert "torchrun --nproc-per-node 2" in report_markdown(document)


def test_the_command_that_estimated_it_is_shown_and_no_trial_is_missed():
    (command,) = commands(ESTIMATED)
    assert command.startswith("autotune estimate --model bert-120m --gpu h100-nvl-94gb")
    assert "the profile is estimated, and rests on no trial" in text_of(ESTIMATED)


@pytest.mark.parametrize("name", ["profile", "tuned"])
def test_machines_read_the_same(name):
    facts = report_facts((ESTIMATED,), (), report_document((ESTIMATED,), ()))["profiles"][0]
    expected = {"profile": ESTIMATED.profile.model_dump(mode="json"), "tuned": None}
    assert facts[name] == expected[name]
