import json
import re

import pytest

from autotune.show.intervals import hours
from autotune.show.report.build import report_document
from autotune.show.report.facts import report_facts
from autotune.show.text import report_html, report_markdown
from tests.autotune.show.report.example import example_inputs
from tests.autotune.show.report.examples import Page, markdown_tables, reported, reported_run
from trainer.events import happened


@pytest.fixture(scope="module", params=["", "<b>|`&\u202e$x$ http://e.example "], ids=["plain", "hostile"])
def three(request):
    inputs = example_inputs(12, request.param)
    document = report_document(*inputs)
    return report_markdown(document), Page(report_html(document)), report_facts(*inputs, document)


def test_markdown_and_html_have_the_same_titles_and_tables_cell_by_cell(three):
    markdown, page, _ = three
    assert markdown_tables(markdown) == page.tables
    assert len(page.tables) > 25
    titles = re.findall(r"(?m)^#+ (.*)$", markdown)
    assert len(titles) == sum(page.tags.count(f"h{level}") for level in range(1, 7))


def test_json_holds_the_numbers_behind_what_is_shown(three):
    _, page, facts = three
    one = facts["profiles"][0]
    assert facts["schema_version"] == 2
    shown = page.text
    assert f"{one['tuned']['value']:,.0f}" in shown
    assert hours(one["pay_back"]["rank_hours"]) in shown
    assert f"{one['dataset']['train_samples']:,}" in shown
    assert f"{100 * one['dataset']['padding_waste_share']:.1f} %" in shown
    assert [part["share"] for part in one["bottlenecks"][0]["parts"]][1] == 0.071
    assert len(one["trials"]) == 12
    assert one["profile"]["evidence"]["probe"]["feasible_max"] == 307
    run = facts["runs"][0]
    assert [drift["quantity"] for drift in run["expected_and_achieved"]] == ["real tokens/s", "MFU", "peak memory"]
    assert f"{run['expected_and_achieved'][0]['achieved']['value']:,.0f}" in shown
    assert len(run["events"]) == 20
    assert run["earlier_events"] == 10
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_what_needs_attention_in_a_run_is_told_and_what_does_not_is_not():
    events = [
        happened(5, "saved", "saved step-000000005"),
        happened(7, "spike", "the loss is 9 | 3 times what it was", level="warning"),
        happened(8, "save_failed", "could not save step 8: No space left on device", level="error"),
    ]
    text = report_markdown(report_document((reported(),), (reported_run(events),)))
    assert "| 7 | warning: spike | the loss is 9 &#124; 3 times what it was |" in text
    assert "| 8 | error: save_failed |" in text
    assert "saved step-000000005" not in text


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("profiles/m.toml", "`autotune baseline --profile profiles/m.toml`"),
        ("a`<b>.toml", "<code>autotune baseline --profile 'a&#96;&#60;b&#62;.toml'</code>"),
    ],
)
def test_commands_stand_as_they_are_typed_unless_markdown_reads_something_in_them(path, shown):
    assert shown in report_markdown(report_document((reported(path),), ()))
