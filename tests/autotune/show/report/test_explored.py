import json

import pytest

from autotune.show.report.build import report_document
from autotune.show.report.document import Missing, Section, Table, blocks_of
from autotune.show.report.facts import report_facts
from autotune.show.report.html import report_html
from autotune.show.report.markdown import report_markdown
from tests.autotune.profiles import example_profile as unexplored_profile
from tests.autotune.show.report.example import example_profile
from tests.autotune.show.report.examples import Page, markdown_tables, reported


def profile_of(**changes):
    profile = example_profile("d")
    found = profile.evidence.explore.model_copy(update=changes)
    return profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"explore": found})})


def section_of(profile):
    document = report_document((reported(profile=profile),), ())
    section = next(one for one in document.sections if one.key == "explored")
    return section, list(blocks_of(Section(title="", key="", blocks=section.blocks)))


def of_kind(blocks, kind):
    return next(block for block in blocks if isinstance(block, kind))


def test_a_profile_that_was_not_explored_says_how_to():
    section, blocks = section_of(unexplored_profile())
    missing = of_kind(blocks, Missing)
    assert missing.state == "not asked for"
    assert missing.commands == ("autotune tune --model tiny --data DIR --explore",)
    assert len(section.blocks) == 1


def test_the_answer_stands_first_then_what_was_tried():
    _, blocks = section_of(profile_of())
    words = "".join(part if isinstance(part, str) else part.text for part in blocks[0].words)
    assert words.startswith("64 packed rows, bf16: 64 packed rows, bf16, compiled is not proven to be faster")
    table = of_kind(blocks, Table)
    assert [row[0] for row in table.rows] == [
        "64 packed rows, bf16, compiled", "64 packed rows, bf16", "64 bucketed rows, bf16",
        "64 packed rows, bf16, full checkpointing", "64 packed rows, bf16, sdpa, compiled",
    ]  # fmt: skip
    assert table.rows[-1][1:] == ["0", None, None, "crashed"]


def test_all_three_forms_carry_the_same_facts():
    one = reported(profile=profile_of())
    document = report_document((one,), ())
    section, blocks = section_of(profile_of())
    told = next(block for block in blocks if hasattr(block, "items")).items
    rows = of_kind(blocks, Table).rows
    page, markdown = Page(report_html(document)), report_markdown(document)
    shown = [["n/a" if cell is None else cell for cell in row] for row in rows]
    assert shown in [table[1:] for table in page.tables]
    assert shown in [table[1:] for table in markdown_tables(markdown)]
    for (line,) in told:
        assert line in page.text
    facts = report_facts((one,), (), document)
    found = json.loads(json.dumps(facts))["profiles"][0]["profile"]["evidence"]["explore"]
    assert found == profile_of().evidence.explore.model_dump(mode="json")
    assert section.title == "Settings searched together"


@pytest.mark.parametrize("form", [report_html, report_markdown])
def test_what_strangers_wrote_is_inert(form):
    profile = profile_of(choice="<script>alert(1)</script>", left_out=["<img src=x onerror=alert(2)>"])
    text = form(report_document((reported(profile=profile),), ()))
    assert "<script" not in text
    assert "<img" not in text
