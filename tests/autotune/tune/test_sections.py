import pytest

from autotune.evidence.baseline import BaselineEvidence, BaselineRow
from autotune.profiles.decide.rates import tuned_rate
from autotune.trials.outcomes import Measured, OutOfMemory
from autotune.trials.values import FinishedTrial, Trial
from autotune.tune.live_view import TuningView
from autotune.tune.sections import best_words, stage_words, stages_text, tuning_text
from autotune.tune.values import Stage, TuningResult
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock


def stages():
    return [
        Stage(
            name="probe",
            model="bert-mini",
            status="done",
            summary="66 sequences fit",
            seconds=55.7,
        ),
        Stage(
            name="workers",
            model="bert-mini",
            status="running",
            note="1 worker, round 2",
            done=3,
            expected=24,
            best="4,000 tokens/s (0 DataLoader workers, round 1)",
            seconds=12.0,
        ),
        Stage(
            name="network",
            model="bert-mini",
            status="skipped",
            summary="requires at least 2 ranks",
        ),
        Stage(
            name="baseline",
            model="bert-mini",
            status="failed",
            summary="the window crashed",
            seconds=3.0,
        ),
        Stage(name="report", model=""),
    ]


def test_every_phase_has_its_line():
    first, *lines = stages_text(
        stages(), seconds=71.0, left_s=100.0, width=120
    ).splitlines()
    assert first == "tune: 3 of 5 phases, 1 min 11 s elapsed, about 1 min 40 s left"
    assert lines[0].split() == [
        "+",
        "probe",
        "bert-mini",
        "55.7",
        "s",
        "66",
        "sequences",
        "fit",
    ]
    assert lines[1].endswith("3 of about 24: 1 worker, round 2")
    assert (
        lines[2].strip()
        == "best so far: 4,000 tokens/s (0 DataLoader workers, round 1)"
    )
    assert lines[3].endswith("skipped: requires at least 2 ranks")
    assert lines[4].endswith("failed: the window crashed")
    assert lines[5].endswith("waiting")


def test_lines_fit_narrow_terminals():
    for narrow in (1, 20, 60):
        lines = stages_text(
            stages(), seconds=71.0, left_s=100.0, width=narrow
        ).splitlines()
        assert len(lines) == 7
        assert all(len(line) <= narrow for line in lines)
    assert stages_text(
        [stage for stage in stages() if stage.over],
        seconds=71.0,
        left_s=100.0,
        width=120,
    ).startswith("tune: 3 of 3 phases, 1 min 11 s elapsed\n")
    assert (
        stage_words(Stage(name="probe", model="m", status="running", note="m: 8 rows"))
        == "8 rows"
    )


def test_overdue_tuning_promises_no_time():
    first, *_ = stages_text(stages(), seconds=71.0, left_s=0.0, width=120).splitlines()
    assert first.endswith("elapsed, longer than expected")


def test_countdown_never_rises():
    clock = FakeClock()
    stage = Stage(name="workers", model="m", status="running", budget_s=60.0)
    view = TuningView(planned=[stage], clock=clock, budget_s=600.0)
    view.begin(stage)
    stage.done, stage.expected = 9, 10
    clock.sleep(9.0)
    assert "about 1 s left" in view._text()
    # The last trial takes much longer than those before it.
    clock.sleep(30.0)
    stage.expected = 20
    assert "about 1 s left" in view._text()


def finished(job, measured, figures, label):
    outcome = OutOfMemory(detail="") if figures is None else Measured(figures=figures)
    trial = Trial(job=job, measured=measured, timeout_s=1.0)
    return FinishedTrial(
        trial=trial, outcome=outcome, seconds=1.0, label=label, from_trial_log=False
    )


def keeps_up(rate, label, *, cached=False, **more):
    figures = WINDOW_FIGURES | {
        "unit": "tokens",
        "units_per_s": rate,
        "padded_units_per_s": 10 * rate,
    }
    measured = {"cached": cached, "step": {"arguments": more}}
    return finished("window", measured, figures, label)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([], ""),
        ([finished("step", {}, None, "8 sequences")], ""),
        # Batches from memory are no choice of loader workers.
        (
            [
                keeps_up(
                    5000,
                    "batches from memory, round 1 (at most 10 s left)",
                    cached=True,
                ),
                keeps_up(4000, "1 loader workers, round 1 (at most 9 s left)"),
            ],
            "4,000 tokens/s (1 loader workers, round 1)",
        ),
        # Explored settings are named; the check of the loss is none of them.
        (
            [
                keeps_up(4000, "8 packed sequences, fp32 (short window)", cached=True),
                keeps_up(4400, "16 packed sequences, bf16 (round 2)", cached=True),
                keeps_up(
                    9000,
                    "equal loss, bf16",
                    cached=True,
                    losses=True,
                ),
            ],
            "4,400 tokens/s (16 packed sequences, bf16)",
        ),
    ],
    ids=["no trials", "out of memory", "sweep", "exploration"],
)
def test_best_so_far_is_a_real_rate(trials, words):
    assert best_words(trials) == words


def result(**changes):
    values = {
        "profiles": ("p/tiny-cpu.toml",),
        "report": "r/tiny-cpu/report.html",
        "stages": (),
        "seconds": 1.0,
        "seconds_in_children": 0.9,
        "next_steps": ("autotune advise p", "autotune train p"),
    }
    return TuningResult(**values | changes)


def worth(profile):
    rows = [
        BaselineRow(
            name=name,
            subject="mlm: m",
            units_per_s=[900.0, 1000.0, 1100.0],
            speedup=speedup,
            outcome="ran",
        )
        for name, speedup in (("paper", 2.0), ("untuned", 1.25), ("tuned", None))
    ]
    rows[1] = rows[1].model_copy(update={"speedup_low": 1.2, "speedup_high": 1.3})
    baseline = BaselineEvidence(
        rows=rows,
        unit="tokens",
        window_s=1.0,
        windows=9,
        seconds=9.0,
        local_ranks=1,
    )
    return but(profile, evidence={"baseline": baseline})


def test_each_model_has_its_row():
    head, row, _, note, *rest = tuning_text(
        result(), [worth(example_profile())]
    ).splitlines()
    assert head.split() == [
        "subject",
        *[
            "max",
            "micro_batch_size",
            "batch",
            "workers",
            "tokens/s",
            "vs",
            "untuned",
            "vs",
            "paper",
        ],
    ]
    rate = tuned_rate(worth(example_profile())).interval
    bounds = f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"
    assert (
        " ".join(row.split())
        == f"tiny 2 256 = 128 x 2 1 {bounds} 1.25x (1.20x to 1.30x) 2.00x"
    )
    assert "95 % intervals" in note
    assert rest == [
        "profile: p/tiny-cpu.toml",
        "report: r/tiny-cpu/report.html",
        "next: autotune advise p",
        "then: autotune train p",
    ]


def test_unmeasured_figures_are_missing():
    bare = but(example_profile(), evidence={"workers": None})
    failed = Stage(
        name="workers", model="tiny", status="failed", summary="the window crashed"
    )
    text = tuning_text(result(stages=(failed,), report=None), [bare])
    # Tokens/s of the probe's steps.
    assert text.splitlines()[1].split()[-3:] == ["n/a", "58.89", "n/a"]
    assert "not done: workers of tiny: the window crashed" in text
    assert "report:" not in text
    nothing = tuning_text(
        result(profiles=(), report=None, next_steps=(), stages=(failed,)), []
    )
    assert nothing == "not done: workers of tiny: the window crashed"  # and no table
