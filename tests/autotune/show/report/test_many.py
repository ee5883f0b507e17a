"""Reports of several profiles and runs: what is told of them, what is left out, and that no two are mixed up."""

import dataclasses
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.show.report.build import report_document
from autotune.show.report.document import Chart, LeftOut, Section, Table, blocks_of, first_of
from autotune.show.report.events import MOST_EVENTS
from autotune.show.report.facts import report_facts
from autotune.show.report.html import report_html
from autotune.show.report.inputs import named
from autotune.show.report.markdown import report_markdown
from autotune.tuning.report import MOST_PROFILES, MOST_RUNS, build_report
from tests.autotune.show.report.example import example_inputs
from tests.autotune.show.report.examples import Page, markdown_tables, reported, reported_run
from tests.trainer.rows import row_of
from trainer.events import happened


def of_kind(document, kind):
    return [block for block in blocks_of(document) if isinstance(block, kind)]


def table_of(document, caption):
    return next(table for table in of_kind(document, Table) if table.caption == caption)


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
    page = Page(report_html(document))
    assert all(page.text.count(name) > 5 for name in names)
    assert len(page.values("id")) == len(set(page.values("id")))
    assert markdown_tables(report_markdown(document)) == page.tables


def test_two_profiles_of_the_same_file_name_are_told_apart_in_titles_and_tables():
    profiles = (reported("a/m.toml"), reported("b/m.toml"))
    document = report_document(profiles, ())
    titles = {section.title for section in of_kind(document, Section)}
    assert {"a/m", "b/m"} <= titles
    assert "m" not in titles
    assert table_of(document, "The machine").headers == ("what", "a/m", "b/m")
    assert [row[0] for row in table_of(document, "All profiles").rows] == ["a/m", "b/m"]


def test_labels_are_short_and_steer_nothing():
    long, hostile = reported(f"{'x' * 99}.toml"), reported_run(name="a\u202e\x1b")
    (one,), (run,) = named((long,), (hostile,))
    assert len(one.title) == 36
    assert run.name.isprintable()


def test_more_than_a_report_takes_is_a_usage_error(tmp_path):
    for profiles, runs in ((MOST_PROFILES + 1, 0), (1, MOST_RUNS + 1)):
        with pytest.raises(UsageError, match="exceed"):
            build_report([tmp_path] * profiles, tmp_path, tmp_path / "r.html", runs=[tmp_path] * runs)


def test_what_does_not_fit_is_left_out_with_a_word_and_the_json_has_all_trials():
    inputs = example_inputs(2500)
    document = report_document(*inputs)
    facts = report_facts(*inputs, document)
    assert len(facts["profiles"][0]["trials"]) > 2400
    told = {one["what"]: (one["shown"], one["of"]) for one in facts["not_in_the_other_files"]}
    shown, of = told[f"trials of {facts['profiles'][0]['name']}"]
    assert shown == 1200 < of == len(facts["profiles"][0]["trials"])
    text = " ".join(Page(report_html(document)).text.split())
    for block in of_kind(document, LeftOut):
        assert f"{block.shown:,} of {block.of:,} {block.what} are shown here" in text


def test_the_latest_events_of_a_run_are_told():
    warned = [happened(step, "spike", "odd", level="warning") for step in range(MOST_EVENTS + 5)]
    document = report_document((reported(),), (reported_run(warned, name="r"),))
    assert [row[1] for row in table_of(document, "Events of runs").rows] == [str(n) for n in range(5, MOST_EVENTS + 5)]
    assert [block.of for block in of_kind(document, LeftOut)] == [MOST_EVENTS + 5]


def test_a_change_that_many_made_is_told_once():
    runs = tuple(reported_run(name=f"r{n}", recipe_changes=["dropout 0 instead of 0.1"]) for n in range(9))
    document = report_document((reported(),), runs)
    recipe = next(section for section in document.sections if section.key == "recipe")
    said = [[getattr(part, "text", part) for part in item] for item in recipe.blocks[0].items]
    assert ["r0, r1, r2 and 6 more of them", ": Dropout 0 instead of 0.1."] in said


def test_a_run_with_a_profile_elsewhere_is_told_with_its_steps():
    runs = tuple(reported_run(steps=tuple(row_of(n) for n in range(1, 40)), name=f"r{n}") for n in range(3))
    table = table_of(report_document((reported(),), runs), "Training runs")
    assert [row[1] for row in table.rows] == [None] * 3


def test_what_matters_is_kept_before_others_in_the_order_of_all():
    assert first_of([1, 2, 3], 3, "things") == ([1, 2, 3], ())
    kept, (left,) = first_of([1, 2, 3, 4, 5, 6], 3, "things", first=lambda one: one in (4, 6), which="even ones")
    assert kept == [1, 4, 6]
    assert left == LeftOut(what="things", shown=3, of=6, which="even ones")
