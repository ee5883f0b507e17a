from dataclasses import replace

import pytest

from autotune.base.interval import NOT_ENOUGH
from autotune.base.render import markdown_text
from autotune.report.decide import main_bottleneck, quality_of
from autotune.report.sections import pull_request
from autotune.trials.values import Contaminated
from testbed.examples.profiles import but
from testbed.examples.trials import record
from testbed.examples.tuning import (
    example_bottleneck,
    example_inputs,
    example_profile,
)
from tests.autotune.report.examples import reported, reported_run

FULL = example_profile("d").evidence
DISTURBED = replace(
    record("step").finished(), outcome=Contaminated(detail="other processes")
)


def baseline(windows=10, window_s=5.0, **row):
    rows = [
        one.model_copy(update={"tokens_per_s": one.tokens_per_s[:1] * windows} | row)
        for one in FULL.baseline.rows
    ]
    return {
        "baseline": FULL.baseline.model_copy(
            update={"rows": rows, "window_s": window_s}
        )
    }


def curve(*rates):
    pairs = zip(FULL.probe.curve, rates, strict=False)
    points = [
        point.model_copy(update={"padded_tokens_per_s": rate}) for point, rate in pairs
    ]
    return {"probe": FULL.probe.model_copy(update={"curve": points})}


@pytest.mark.parametrize(
    ("evidence", "grade", "reason", "stage"),
    [
        ({}, "high", "", None),
        (baseline(windows=4), "medium", "only 4 windows per recipe", "baseline"),
        (baseline(windows=2), "low", "only 2 windows per recipe", "baseline"),
        (baseline(window_s=0.5), "medium", "windows of only 500 ms", "baseline"),
        (
            baseline(speedup=1.1, speedup_low=0.9, speedup_high=1.3),
            "low",
            "includes 1",
            "baseline",
        ),
        (
            baseline(speedup=2.0, speedup_low=1.8, speedup_high=2.2),
            "medium",
            "±10.0 %",
            "baseline",
        ),
        (
            curve(100.0, 200.0, 180.0, 210.0),
            "medium",
            "throughput dips at micro-batch 4",
            None,
        ),
        (
            {"trials": (DISTURBED,)},
            "medium",
            "1 trial disturbed by other load",
            "baseline",
        ),
        (
            {"workers": None},
            "medium",
            "DataLoader workers were not measured",
            "workers",
        ),
        ({"probe": None}, "low", "not probed", "probe"),
    ],
)
def test_doubts_lower_the_grade_and_name_the_command_that_measures_again(
    evidence, grade, reason, stage
):
    changes = dict(evidence)
    trials = changes.pop("trials", ())
    found = quality_of(
        reported(
            profile=but(example_profile("d"), evidence=baseline() | changes),
            trials=trials,
        )
    )
    assert (found.grade, reason in "; ".join(found.reasons), bool(found.reasons)) == (
        grade,
        True,
        bool(reason),
    )
    assert (found.command or "none").startswith(
        f"autotune {stage} " if stage else "none"
    )


def test_the_bottleneck_is_that_of_a_run_as_tuned_if_it_is_long_and_else_that_of_the_tuning():
    (one, _), (run,) = example_inputs(1)
    assert main_bottleneck(one, (run,)) is run.bottlenecks[0]
    short = replace(run, bottlenecks=(replace(example_bottleneck("run"), steps=29),))
    for other in (
        short,
        replace(run, otherwise=("layout",)),
        replace(run, profile_path=None),
        reported_run(),
    ):
        assert main_bottleneck(one, (other,)) is one.bottlenecks[0]
    assert main_bottleneck(replace(one, bottlenecks=()), ()) is None


def test_the_answer_for_a_pull_request_has_five_lines():
    (one, _), runs = example_inputs(1)
    lines = [
        line for line in markdown_text(pull_request(one, runs)).splitlines() if line
    ]
    assert [line.partition(":")[0] for line in lines] == [
        "**bert-120m**",
        "- Use",
        "- Bottleneck",
        "- Quality",
        "- Next",
    ]
    assert (
        "**2.94x** the throughput of defaults (95 % interval 2.91 to 2.99)" in lines[0]
    )


def test_the_headline_says_what_could_not_be_compared_and_where_a_rate_is_from():
    def headline(**evidence):
        words, _ = pull_request(
            reported(profile=but(example_profile("d"), evidence=evidence)), ()
        )
        return markdown_text((words,))

    failed = baseline(speedup=None, outcome="out of memory")
    assert (
        "no comparison with defaults (out of memory) and no comparison with"
        in headline(**failed)
    )
    few = baseline(speedup=2.0, speedup_low=None)
    assert (
        f"**2.00x** the throughput of defaults ({NOT_ENOUGH}) and **2.00x** that of"
        in headline(**few)
    )
    assert "by the worker sweep)" in headline(baseline=None)
    assert "by steps of the probe)" in headline(baseline=None, workers=None)
    assert "Throughput was not measured: `autotune probe" in headline(
        baseline=None, workers=None, probe=None
    )
