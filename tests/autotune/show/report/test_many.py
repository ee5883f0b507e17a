"""Reports of many profiles and runs: what is told of them, what is left out, and that no two are mixed up."""

import dataclasses
from pathlib import Path

import pytest

from autotune.show.report.build import report_document
from autotune.show.report.document import Chart, LeftOut, Section, Table, blocks_of
from autotune.show.report.facts import report_facts
from autotune.show.report.html import report_html
from autotune.show.report.limits import MOST_CARDS, MOST_CURVES, MOST_DRAWN_PROFILES, MOST_EVENTS, MOST_ROWS, MOST_RUNS
from autotune.show.report.markdown import report_markdown
from tests.autotune.show.report.example import example_inputs, many_inputs
from tests.autotune.show.report.examples import Page, markdown_tables, reported, reported_run
from tests.trainer.rows import row_of
from trainer.events import happened

PROFILES, RUNS = MOST_DRAWN_PROFILES + 2, MOST_RUNS + 50


@pytest.fixture(scope="module")
def inputs():
    return many_inputs(PROFILES, RUNS, trials=400)


@pytest.fixture(scope="module")
def document(inputs):
    return report_document(*inputs)


@pytest.fixture(scope="module")
def facts(inputs, document):
    return report_facts(*inputs, document)


@pytest.fixture(scope="module")
def page(document):
    return Page(report_html(document))


def of_kind(document, kind):
    return [block for block in blocks_of(document) if isinstance(block, kind)]


def table_of(document, caption):
    return next(table for table in of_kind(document, Table) if table.caption == caption)


def test_runs_are_rows_of_one_table(document):
    (table,) = [table for table in of_kind(document, Table) if table.caption == "Training runs"]
    assert len(table.rows) == MOST_RUNS
    assert {len(row) for row in table.rows} == {len(table.headers)}
    assert table.headers[:3] == ("run", "profile", "ended")


def test_what_was_expected_of_all_runs_is_one_table_with_a_count_of_verdicts(document, facts):
    (table,) = [table for table in of_kind(document, Table) if table.caption == "Expected and achieved"]
    assert table.headers[:3] == ("run", "what", "verdict")
    assert len(table.rows) == MOST_ROWS
    counted = {(row[0], row[1]): int(row[2]) for row in table_of(document, "How many runs kept what was expected").rows}
    every = [(one["quantity"], one["verdict"]) for run in facts["runs"] for one in run["expected_and_achieved"]]
    assert counted == {what: every.count(what) for what in set(every)}


def test_runs_that_drifted_are_told_before_others(document):
    table = table_of(document, "Expected and achieved")
    assert all(row[2].startswith("drift") for row in table.rows)


def test_json_has_every_run_and_trial_and_says_what_the_others_leave_out(document, facts, page):
    assert len(facts["runs"]) == RUNS
    assert [len(one["trials"]) for one in facts["profiles"]] == [400] * PROFILES
    told = {one["what"]: (one["shown"], one["of"]) for one in facts["not_in_the_other_files"]}
    assert told["training runs"] == (MOST_RUNS, RUNS)
    assert told["curves of the loss"] == (MOST_CURVES, RUNS)
    text = " ".join(page.text.split())
    for block in of_kind(document, LeftOut):
        assert f"{block.shown:,} of {block.of:,} {block.what} are shown here" in text
        assert block.shown < block.of


def test_markdown_has_the_same_tables_as_the_page(document, page):
    assert markdown_tables(report_markdown(document)) == page.tables


def test_charts_of_the_first_profiles_are_drawn_and_the_others_have_their_figures(document):
    memory = next(section for section in document.sections if section.key == "memory")
    parts = [block for block in memory.blocks if isinstance(block, Section)]
    charts = [[block for block in part.blocks if isinstance(block, Chart)] for part in parts]
    assert [len(found) for found in charts] == [1] * MOST_DRAWN_PROFILES + [0] * (PROFILES - MOST_DRAWN_PROFILES)
    assert len(of_kind(document, Chart)) < 10 * MOST_DRAWN_PROFILES
    last = [block for block in parts[-1].blocks if isinstance(block, Table)]
    assert charts[0][0].table.rows in [table.rows for table in last]


def test_anchors_are_unique_and_every_profile_and_run_has_a_name_of_its_own(page, facts):
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    names = [one["name"] for one in [*facts["profiles"], *facts["runs"]]]
    assert len(set(names)) == len(names) == PROFILES + RUNS


def test_two_runs_of_the_same_name_are_told_apart_in_tables_and_legends():
    (one, _), (run,) = example_inputs(20)
    two = [
        dataclasses.replace(run, run=dataclasses.replace(run.run, directory=Path(parent) / "runs" / "same"))
        for parent in ("ours", "theirs")
    ]
    document = report_document((one,), tuple(two))
    names = ["ours/runs/same", "theirs/runs/same"]
    assert [row[0] for row in table_of(document, "Training runs").rows] == names
    assert list(dict.fromkeys(row[0] for row in table_of(document, "Expected and achieved").rows)) == names
    charts = {chart.title: chart for chart in of_kind(document, Chart)}
    assert [line.name for line in charts["Loss by step"].drawing.lines if line.kind == "line"] == names
    assert [stack.label for stack in charts["Parts of a step"].drawing.stacks][-2:] == names
    assert [row[0] for row in table_of(document, "Events of runs").rows][::MOST_EVENTS] == names
    text = Page(report_html(document)).text
    assert all(text.count(name) > 5 for name in names)


def test_two_profiles_of_the_same_file_name_are_told_apart_in_titles_and_tables():
    profiles = (reported("a/m.toml"), reported("b/m.toml"))
    document = report_document(profiles, ())
    titles = {section.title for section in of_kind(document, Section)}
    assert {"a/m", "b/m"} <= titles
    assert "m" not in titles
    assert table_of(document, "The machine").headers == ("what", "a/m", "b/m")
    assert [row[0] for row in table_of(document, "All profiles").rows] == ["a/m", "b/m"]


def test_further_recommendations_are_a_line_each(facts, document):
    cards = [section for section in of_kind(document, Section) if section.badge]
    assert len(cards) == min(MOST_CARDS, sum(len(one["advice"]) for one in [*facts["profiles"], *facts["runs"]]))
    (one, other), runs = example_inputs(4)
    much = dataclasses.replace(one, advice=one.advice * 20)
    document = report_document((much, other), runs)
    assert len([section for section in of_kind(document, Section) if section.badge]) == MOST_CARDS
    further = table_of(document, "Further recommendations")
    assert len(further.rows) == 60 - MOST_CARDS
    assert "must" not in {row[1] for row in further.rows}


def test_errors_are_told_before_warnings_where_not_all_events_fit():
    warned = [happened(step, "spike", "odd", level="warning") for step in range(MOST_EVENTS)]
    runs = tuple(reported_run(warned, name=f"r{n}") for n in range(MOST_ROWS // MOST_EVENTS))
    failed = reported_run([happened(1, "save_failed", "no space", level="error")], name="failed")
    table = table_of(report_document((reported(),), (*runs, failed)), "Events of runs")
    assert len(table.rows) == MOST_ROWS
    assert ["failed", "1", "error: save_failed"] in [row[:3] for row in table.rows]


def test_a_change_that_many_made_is_told_once():
    runs = tuple(reported_run(name=f"r{n}", recipe_changes=["dropout 0 instead of 0.1"]) for n in range(9))
    document = report_document((reported(),), runs)
    recipe = next(section for section in document.sections if section.key == "recipe")
    said = [[getattr(part, "text", part) for part in item] for item in recipe.blocks[0].items]
    assert ["r0, r1, r2 and 6 more of them", ": Dropout 0 instead of 0.1."] in said


def test_what_differs_between_many_machines_is_a_row_each():
    profiles = []
    for number in range(6):
        one = reported(f"m{number}.toml")
        made_on = one.profile.fingerprint.model_copy(update={"driver": "580" if number else "570"})
        profiles.append(dataclasses.replace(one, profile=one.profile.model_copy(update={"fingerprint": made_on})))
    document = report_document(tuple(profiles), ())
    differs = table_of(document, "What differs")
    assert {row[1] for row in differs.rows} == {"driver"}
    assert [row[2] for row in differs.rows] == ["570", *["580"] * 5]
    assert len(table_of(document, "The machine, alike in all 6 profiles").rows) > 10


def test_a_run_with_a_profile_elsewhere_is_told_with_its_steps():
    runs = tuple(reported_run(steps=tuple(row_of(n) for n in range(1, 40)), name=f"r{n}") for n in range(3))
    table = table_of(report_document((reported(),), runs), "Training runs")
    assert [row[1] for row in table.rows] == [None] * 3
