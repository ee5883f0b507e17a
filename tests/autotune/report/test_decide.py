from dataclasses import replace

import pytest

from autotune.base.interval import NOT_ENOUGH
from autotune.base.render_markdown import markdown_text
from autotune.evidence.confirm import DeliveredTraining
from autotune.evidence.probe import GrownKernel, ThroughputDip
from autotune.report.decide import main_bottleneck, quality_of
from autotune.report.sections import pull_request
from autotune.trials.outcomes import Contaminated
from autotune.trials.trial_bench import site_facts
from testbed.examples.kernels import LAYER_NORM_BACKWARD, near_bounds, with_kernels
from testbed.examples.profiles import FINGERPRINT, but
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


def on_machine_with_load(load_average_1min):
    site = site_facts(FINGERPRINT, load_average_1min)
    return replace(record("step").finished(), made_on=site)


def baseline(windows=10, window_s=5.0, **changes):
    rows = [
        row.model_copy(update={"units_per_s": row.units_per_s[:1] * windows} | changes)
        for row in FULL.baseline.rows
    ]
    return {
        "baseline": FULL.baseline.model_copy(
            update={"rows": rows, "window_s": window_s}
        )
    }


def dip(*kernels):
    """Return evidence of a probe with a dip, which these kernels explain."""
    found = ThroughputDip(
        smaller_size=2, larger_size=4, ratio=0.9, kernels=list(kernels)
    )
    return {"probe": FULL.probe.model_copy(update={"dip": found})}


def promise(delivered_tokens_per_s, **changes):
    """Return evidence that training was promised 97.5 to 102.5 tokens/s."""
    profile = with_kernels(example_profile("d"), near_bounds())
    delivered = DeliveredTraining(
        tokens_per_s=delivered_tokens_per_s, steps=30, seconds=20.0
    )
    return {
        "confirm": profile.evidence.confirm.model_copy(
            update={"delivered": delivered, "not_delivered": None} | changes
        )
    }


GROWN = GrownKernel(name=LAYER_NORM_BACKWARD, ratio=4.5, added_s_per_token=3.5e-7)


@pytest.mark.parametrize(
    ("evidence", "grade", "reason", "stage"),
    [
        ({}, "high", "", None),
        (baseline(windows=4), "medium", "only 4 windows each", "baseline"),
        (baseline(windows=2), "low", "only 2 windows each", "baseline"),
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
        (dip(), "medium", "no kernel explains it", None),
        (dip(GROWN), "high", "", None),
        (promise(92.0), "medium", "outside the promised interval", "confirm"),
        (promise(100.0), "high", "", None),
        (
            promise(100.0, promised_low=94.0, promised_high=106.0),
            "medium",
            "throughput known only within ±6.0 %",
            "confirm",
        ),
        (
            promise(100.0, promised_low=None, promised_high=None),
            "low",
            "throughput too noisy for so few measurements",
            "confirm",
        ),
        (
            baseline(speedup=2.0, speedup_low=None, speedup_high=None),
            "low",
            "speedup over untuned settings too noisy for so few measurements",
            "baseline",
        ),
        (
            baseline(windows=2) | promise(92.0),
            "low",
            "only 2 windows each; outside the promised interval",
            "confirm",
        ),
        (
            {"trials": (DISTURBED,)},
            "medium",
            "1 trial disturbed by other load",
            "baseline",
        ),
        ({"trials": (on_machine_with_load(0.9),)}, "high", "", None),
        (
            {"trials": (on_machine_with_load(0.9), on_machine_with_load(17.14))},
            "medium",
            "load average 17.14 with 2 CPU cores",
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
    ids=[
        "none",
        "4 windows",
        "2 windows",
        "short windows",
        "interval includes 1",
        "wide interval",
        "dip without a reason",
        "dip with a reason",
        "promise not kept",
        "promise kept",
        "wide promise",
        "promise without bounds",
        "speedup without bounds",
        "promise not kept after few windows",
        "disturbed trial",
        "quiet machine",
        "busy machine",
        "no workers",
        "no probe",
    ],
)
def test_doubts_lower_the_grade(evidence, grade, reason, stage):
    changes = dict(evidence)
    trials = changes.pop("trials", ())
    quality = quality_of(
        reported(
            profile=but(example_profile("d"), evidence=baseline() | changes),
            trials=trials,
        )
    )
    assert (
        quality.grade,
        reason in "; ".join(quality.reasons),
        bool(quality.reasons),
    ) == (
        grade,
        True,
        bool(reason),
    )
    assert (quality.command or "none").startswith(
        f"autotune {stage} " if stage else "none"
    )


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"window_s": 2.0}, "--window 10s --time-limit 10min"),
        ({"window_s": 10.0, "seconds": 100.0}, "--window 20s --time-limit 10min"),
        ({"window_s": 20.0, "seconds": 500.0}, "--window 40s --time-limit 17min"),
    ],
)
def test_promise_is_measured_again_in_longer_windows(changes, options):
    evidence = promise(92.0, **changes)
    profile = but(example_profile("d"), evidence=baseline() | evidence)
    quality = quality_of(reported(profile=profile))
    assert quality.command == f"autotune confirm profiles/m.toml {options}"


def test_long_run_decides_the_bottleneck():
    (profile, _), (run,) = example_inputs(1)
    assert main_bottleneck(profile, (run,)) is run.bottlenecks[0]
    short = replace(run, bottlenecks=(replace(example_bottleneck("run"), steps=29),))
    for other_run in (
        short,
        replace(run, other_settings=("layout",)),
        replace(run, profile_path=None),
        reported_run(),
    ):
        assert main_bottleneck(profile, (other_run,)) is profile.bottlenecks[0]
    assert main_bottleneck(replace(profile, bottlenecks=()), ()) is None


def test_pull_request_has_five_lines():
    (profile, _), runs = example_inputs(1)
    lines = [
        line for line in markdown_text(pull_request(profile, runs)).splitlines() if line
    ]
    assert [line.partition(":")[0] for line in lines] == [
        "**bert-120m**",
        "- Use",
        "- Bottleneck",
        "- Quality",
        "- Next",
    ]
    assert (
        "**2.94x** the throughput of untuned settings (95 % interval 2.91 to 2.99)"
        in lines[0]
    )


def headline(**evidence):
    words, _ = pull_request(
        reported(profile=but(example_profile("d"), evidence=evidence)), ()
    )
    return markdown_text((words,))


def test_headline_explains_missing_comparison():
    failed = baseline(speedup=None, outcome="out of memory")
    assert (
        "no comparison with untuned settings (out of memory) and no comparison with"
        in headline(**failed)
    )
    few = baseline(speedup=2.0, speedup_low=None)
    assert (
        f"**2.00x** the throughput of untuned settings ({NOT_ENOUGH}) and **2.00x**"
        " that of" in headline(**few)
    )


def test_headline_names_source_of_rate():
    assert "by the worker sweep)" in headline(baseline=None)
    assert "by steps of the probe)" in headline(baseline=None, workers=None)
    assert "Throughput was not measured: `autotune probe" in headline(
        baseline=None, workers=None, probe=None
    )
