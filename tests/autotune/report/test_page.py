import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.document import (
    FACTS,
    Chart,
    Code,
    Missing,
    Pairs,
    Section,
    SideBySide,
    Table,
)
from autotune.base.render_markdown import report_markdown
from autotune.base.severity import SEVERITIES
from autotune.errors import UsageError
from autotune.evidence.profile import Evidence
from autotune.report.page import report_document, report_facts
from autotune.report.runs import MOST_EVENTS, loss_points
from autotune.report.stage import MOST_PROFILES, MOST_RUNS, build_report
from testbed.examples.profiles import but
from testbed.examples.run_rows import row_of
from testbed.examples.trials import record
from testbed.examples.tuning import (
    example_inputs,
    example_manifest,
    example_profile,
)
from tests.autotune.report.examples import blocks_of, of_kind, reported, reported_run
from trainer.formats.events import new_event
from trainer.formats.manifest import LengthHistogram

NULL = "0.0 (nullgpu)"


def table_of(document, caption):
    return next(
        table for table in of_kind(document, Table) if table.caption.startswith(caption)
    )


def test_every_evidence_has_its_chart():
    (profile, *_), runs = example_inputs(4)
    charts = {
        chart.title: chart
        for chart in of_kind(report_document((profile,), runs), Chart)
    }
    assert len(charts) == 8
    curve = charts["Throughput by micro_batch_size"]
    assert len(curve.drawing.lines[0].points) == len(curve.table.rows) == 10
    assert (curve.drawing.shade.start, curve.drawing.shade.end) == (32, 128)
    memory = charts["Memory breakdown at 307 sequences"]
    terms = profile.profile.evidence.probe.traced_terms_bytes
    assert sum(size for _, size in memory.drawing.stacks[0].parts) == pytest.approx(
        sum(terms.values())
    )
    assert {line.value for line in memory.drawing.reference_lines} == {
        profile.profile.constraints.memory_budget_bytes
    }


def test_missing_parts_are_listed_by_command():
    document = report_document((reported(intact=False),), ())
    assert "edited by hand" in report_markdown(document)
    assert "edited by hand" not in report_markdown(report_document((reported(),), ()))
    listed = next(section for section in document.sections if section.key == "missing")
    titles = [missing.subject.partition(":")[0] for missing in listed.blocks]
    assert "Network" in titles
    # Each once; another is the approval.
    assert len(set(titles)) == len(titles) == len(of_kind(document, Missing)) - 1
    assert all(missing.commands for missing in listed.blocks)
    assert dict(of_kind(document, Pairs)[0].pairs)["Trials"][0].endswith(
        f"Not measured: {', '.join(titles).lower()}."
    )


def test_undecided_workers_need_more_time():
    workers = example_profile("d").evidence.workers.model_copy(
        update={"undecided_between": [2, 4], "seconds": 600.0}
    )
    profile = example_profile("d").model_copy(
        update={"evidence": Evidence(workers=workers)}
    )
    text = report_markdown(report_document((reported(profile=profile),), ()))
    assert "3 workers (undecided between 2 and 4)" in text
    assert "autotune workers" in text


def test_advice_keeps_its_order():
    sections = of_kind(report_document(*example_inputs(4)), Section)
    assert len({section.key for section in sections}) == len(sections)
    cards = [section for section in sections if section.badge]
    assert [card.badge for card in cards] == list(SEVERITIES[:2])
    assert cards[0].title.startswith("1. ")
    (profile, _), _ = example_inputs(4)
    for advice, command in (
        (profile.advice, "autotune doctor"),
        (profile.advice[2:], f"autotune train {profile.quoted}"),
    ):
        document = report_document((dataclasses.replace(profile, advice=advice),), ())
        assert dict(of_kind(document, Pairs)[0].pairs)["Next"] == (Code(text=command),)


def test_profile_and_its_run_recommend_once():
    (profile, *_), runs = example_inputs(4)
    (advice, *_) = profile.advice
    run = dataclasses.replace(runs[0], profile_path=profile.path, advice=(advice,))
    other = dataclasses.replace(run, profile_path=None)
    for reported_runs, cards in (((run,), 1), ((other,), 2)):
        sections = of_kind(report_document((profile,), reported_runs), Section)
        claims = [section.title for section in sections if section.badge]
        assert sum(title.endswith(advice.claim) for title in claims) == cards


def test_recipe_changes_are_named_once():
    profiles, runs = example_inputs(4)
    more = tuple(
        reported_run(name=f"r{n}", recipe_changes=["dropout 0 instead of 0.1"])
        for n in range(9)
    )
    document = report_document(profiles, (*runs, *more))
    (changes,) = dict(of_kind(document, Pairs)[0].pairs)["Recipe"]
    assert changes.startswith(
        "attention dropout 0 instead of the model's own; bf16 gradients instead of fp32"
    )
    assert [row[-1] for row in table_of(document, "Training runs").rows][1:] == [
        "dropout 0 instead of 0.1"
    ] * 9


def test_run_without_loss_has_no_chart():
    document = report_document(
        (reported(),),
        (reported_run(steps=(row_of(1, loss=None),)), reported_run(steps=())),
    )
    assert "Loss by step" not in [chart.title for chart in of_kind(document, Chart)]
    table = table_of(document, "Training runs")
    assert [
        dict(zip(table.headers, row, strict=True))["steps"] for row in table.rows
    ] == ["1", "0"]


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        pytest.param(
            [0], "The dataset's manifest has no sample lengths to draw.", id="unknown"
        ),
        pytest.param(
            [0, 1024], "All 9 samples have 1,024 or more tokens: no chart.", id="long"
        ),
    ],
)
def test_lengths_without_bars_have_no_chart(edges, reason):
    manifest = example_manifest()
    counts = [0] * (len(edges) - 1) + [9]
    histogram = LengthHistogram(edges=edges, counts=counts)
    train = manifest.train.model_copy(update={"length_histogram": histogram})
    dataset = manifest.model_copy(update={"train": train})
    document = report_document((reported(dataset=dataset),), ())
    assert "Sample lengths" not in [chart.title for chart in of_kind(document, Chart)]
    text = report_markdown(document)
    assert reason in text
    assert ("mean tokens per sample" in text) == (edges != [0])


def test_loss_is_averaged_over_stretches():
    points = loss_points(
        reported_run(
            steps=tuple(row_of(step, loss=float(step)) for step in range(1, 1001))
        ).run
    )
    assert len(points) <= 48
    assert (points[0].first_step, points[-1].last_step) == (1, 1000)
    assert points[0].loss == pytest.approx(
        (points[0].first_step + points[0].last_step) / 2
    )


EXTREMES = st.sampled_from([1e-308, 1e-9, 1.0, 1e18, 1e308])


@settings(max_examples=40)
@given(st.lists(EXTREMES, max_size=4), EXTREMES, st.lists(st.floats(-1, 1), max_size=3))
def test_extreme_figures_make_a_report(windows, ratio, slots):
    evidence = example_profile("d").evidence
    baseline, workers = (
        part.model_copy(
            update={"rows": [row.model_copy(update=values) for row in part.rows]}
        )
        for part, values in (
            (evidence.baseline, {"units_per_s": windows, "speedup": ratio}),
            (evidence.workers, {"units_per_s": slots}),
        )
    )
    profile = but(
        example_profile("d"), evidence={"baseline": baseline, "workers": workers}
    )
    page = reported(profile=profile, trials=example_inputs(3)[0][0].trials)
    assert report_markdown(
        report_document((page,), (reported_run(profile_path=page.path),))
    )
    json.dumps(report_facts((page,), ()), allow_nan=False)


def of_gpu(driver, **changes):
    profile = but(
        example_profile("d"),
        fingerprint={"gpu_name": "NVIDIA H100 NVL", "driver": driver},
    )
    return reported("profiles/null.toml", profile=profile, **changes)


@pytest.mark.parametrize(
    ("driver", "timed_steps", "peak", "rate"),
    [
        ("580.1", 8, "peak memory", "900"),
        ("580.1", 1, "peak memory", None),
        (NULL, 8, "peak memory, allocator", None),
    ],
)
def test_only_timed_trials_have_a_rate(driver, timed_steps, peak, rate):
    finished = record("step").finished()
    trial = dataclasses.replace(
        finished.trial, measured=finished.trial.measured | {"timed_steps": timed_steps}
    )
    reported_profile = of_gpu(
        driver, trials=(dataclasses.replace(finished, trial=trial),)
    )
    table = table_of(report_document((reported_profile,), ()), "Trials")
    assert peak in table.headers
    assert table.rows[0][table.headers.index("tokens/s incl. padding")] == rate


@pytest.mark.parametrize(
    ("budget_bytes", "limit_bytes", "is_explained"),
    [
        pytest.param(10**9 - 1, None, True, id="above the budget"),
        pytest.param(10**9, None, False, id="within the budget"),
        pytest.param(10**9 - 1, 10**9, False, id="under another limit"),
    ],
)
def test_peak_above_the_budget_is_explained(budget_bytes, limit_bytes, is_explained):
    profile = but(
        example_profile("d"),
        constraints={"memory_budget_bytes": budget_bytes},
        fingerprint={"device": "cpu", "gpu_name": None},
    )
    finished = record("step", budget_bytes=limit_bytes).finished()
    page = report_document((reported(profile=profile, trials=(finished,)),), ())
    assert ("1 trial peaked above the budget" in report_markdown(page)) == is_explained


def test_simulated_gpu_is_not_called_measured():
    for other_profiles, measured in (((), False), ((reported(),), True)):
        subtitle = report_document((*other_profiles, of_gpu(NULL)), ()).subtitle
        assert (
            "was measured on a GPU: it is a pretended one, and memory is that of"
            " torch's allocator" in subtitle
        )
        assert ("Measured, unless called predicted." in subtitle) == measured


def test_rejects_ambiguous_names(tmp_path):
    for profiles, runs, match in (
        ([f"{n}" for n in range(MOST_PROFILES + 1)], [], "exceed"),
        (["m.toml"], [f"{n}" for n in range(MOST_RUNS + 1)], "exceed"),
        (["a/m.toml", "b/m.toml"], [], "named 'm'"),
        (["m.toml"], ["a/run", "b/run"], "named 'run'"),
    ):
        with pytest.raises(UsageError, match=match):
            build_report(
                list(map(Path, profiles)),
                tmp_path,
                tmp_path / "r.html",
                runs=list(map(Path, runs)),
            )


def test_profiles_stand_side_by_side():
    profiles = (reported("a/m.toml"), reported("b/n.toml"))
    alone = report_document(profiles[:1], ())
    document = report_document(profiles, ())
    assert "m" not in [section.title for section in of_kind(alone, Section)]
    assert [
        section.title
        for group in document.sections[0].blocks[0].groups
        for section in group
    ] == ["m", "n"]
    assert table_of(document, "Machine").headers == ("field", "m", "n")
    assert {len(beside.groups) for beside in of_kind(document, SideBySide)} == {2}
    facts = [
        table for table in of_kind(document, Table) if table.headers[0] == FACTS[0]
    ]
    assert {table.headers for table in facts} == {("what", "m", "n")}


def test_latest_events_are_shown():
    warned = [
        new_event(step, "spike", "odd", level="warning")
        for step in range(MOST_EVENTS + 5)
    ]
    runs = tuple(reported_run(warned if n == 0 else (), name=f"r{n}") for n in range(7))
    document = report_document((reported(),), runs)
    assert [row[1] for row in table_of(document, "Events of runs").rows] == [
        str(n) for n in range(5, MOST_EVENTS + 5)
    ]
    paragraphs = [
        words for block in blocks_of(document) for words in getattr(block, "words", ())
    ]
    assert f"{MOST_EVENTS} of {MOST_EVENTS + 5} events are shown here" in " ".join(
        map(str, paragraphs)
    )
    assert (
        "6 of 7 curves of the loss are shown here, the first; the JSON file has all."
        in paragraphs
    )
    # Their profile lies elsewhere.
    assert [row[1] for row in table_of(document, "Training runs").rows] == [None] * 7


def test_gpu_activity_is_shown_for_runs_on_gpus():
    steps = [
        row_of(step, gpu_busy_share=0.5 + step / 100, gpu_power_w=300.0)
        for step in range(1, 11)
    ]
    on_gpu = reported_run(steps=steps, name="gpu", device="NVIDIA H100 NVL")
    on_cpu = reported_run(name="cpu")
    document = report_document((reported(),), (on_gpu, on_cpu))
    (row,) = table_of(document, "Activity of the GPUs of training runs").rows
    # The first of ten steps is a warm-up.
    assert row[:2] == ["gpu", "56.0 %"]
    assert row[-2:] == ["300 W", "n/a"]
