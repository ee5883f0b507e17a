import textwrap

import pytest

from autotune.baseline.values import BaselineEvidence, RecipeRow
from autotune.search.sections import exploration_text
from autotune.trials.values import FinishedTrial, Measured, OutOfMemory, Trial
from autotune.tune.sections import best_words, stage_words, stages_text, tuning_text
from autotune.tune.values import Stage, TuningResult
from tests.autotune.profiles.examples import but, example_profile
from tests.autotune.report.example import example_profile as full_example
from tests.autotune.trials.examples import FEED, STEP


def stages():
    return [
        Stage(name="probe", model="bert-mini", status="done", summary="66 rows fit", seconds=55.7),
        Stage(
            name="workers", model="bert-mini", status="running", note="1 loader workers, round 2", done=3, expected=24,
            best="4,000 tokens/s (0 loader workers, round 1)", seconds=12.0,
        ),
        Stage(name="network", model="bert-mini", status="skipped", summary="one rank alone exchanges nothing"),
        Stage(name="baseline", model="bert-mini", status="failed", summary="the window crashed", seconds=3.0),
        Stage(name="report", model=""),
    ]  # fmt: skip


def test_every_stage_has_its_line_with_what_it_came_to_or_does():
    text = stages_text(stages(), seconds=71.0, left_s=100.0, width=120)
    first, *lines = text.splitlines()
    assert first == "tune: 3 of 5 stages, 1 min 11 s gone, about 1 min 40 s left"
    assert lines[0].split() == ["+", "probe", "bert-mini", "55.7", "s", "66", "rows", "fit"]
    assert lines[1].endswith("3 of about 24: 1 loader workers, round 2")
    assert lines[2].strip() == "best so far: 4,000 tokens/s (0 loader workers, round 1)"
    assert lines[3].endswith("skipped: one rank alone exchanges nothing")
    assert lines[4].endswith("failed: the window crashed")
    assert lines[5].endswith("waits")
    for narrow in (1, 20, 60):
        lines = stages_text(stages(), seconds=71.0, left_s=100.0, width=narrow).splitlines()
        assert len(lines) == 7
        assert all(len(line) <= narrow for line in lines)
    done = [one for one in stages() if one.over]
    assert stages_text(done, seconds=71.0, left_s=100.0, width=120).startswith("tune: 3 of 3 stages, 1 min 11 s gone\n")
    assert stage_words(Stage(name="probe", model="m", status="running", note="m: 8 rows")) == "8 rows"


def finished(job, measured, figures, label):
    outcome = OutOfMemory(detail="") if figures is None else Measured(figures=figures)
    trial = Trial(job=job, measured=measured, timeout_s=1.0)
    return FinishedTrial(trial=trial, outcome=outcome, seconds=1.0, label=label, from_trial_log=False)


def stepped(rows, rate=None, budget=2**30, device="cpu", **measured):
    measured |= {"config": {"micro_batch_size": rows, "device": device}, "memory_budget_bytes": budget}
    figures = None if rate is None else STEP | {"padded_tokens_per_step": rate, "step_s": [1.0]}
    return finished("step", measured, figures, f"bert-mini: {rows} rows" + (", speed" if budget is None else ""))


def keeps_up(rate, label, *, cached=False, **more):
    figures = FEED | {"tokens_per_s": rate, "padded_tokens_per_s": 10 * rate}
    return finished("training", {"cached": cached} | more, figures, label)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([], ""),
        ([stepped(8)], ""),
        # Of a probe the largest that fits and the fastest are the best.
        ([stepped(4, 10), stepped(16, 10), stepped(32), stepped(8, 900, None), stepped(16, 700, None)],
         "16 rows fit, 900 tokens/s (8 rows, speed)"),
        # What ran under a limit on a CPU has no speed, and what ran without one shows no fit.
        ([stepped(4, 900)], "4 rows fit"),
        ([stepped(4, 900, None)], "900 tokens/s (4 rows, speed)"),
        ([stepped(4, 900, device="cuda")], "4 rows fit, 900 tokens/s (4 rows)"),
        ([stepped(4, 900, device="cuda", timed_steps=1)], "4 rows fit"),
        # Batches from memory are no choice of loader workers.
        (
            [keeps_up(5000, "batches from memory, round 1 (at most 10 s left)", cached=True),
             keeps_up(4000, "1 loader workers, round 1 (at most 9 s left)")],
            "4,000 tokens/s (1 loader workers, round 1)",
        ),
        # Explored settings are named; the check of the loss is none of them.
        (
            [keeps_up(4000, "8 packed sequences, fp32 (short window)", cached=True),
             keeps_up(4400, "16 packed sequences, bf16 (round 2)", cached=True),
             keeps_up(9000, "equal loss, bf16", cached=True, losses=True)],
            "4,400 tokens/s (16 packed sequences, bf16)",
        ),
    ],
)  # fmt: skip
def test_the_best_so_far_is_of_trials_that_say_so(trials, words):
    assert best_words(trials) == words


def result(**changes):
    values = {
        "profiles": ("p/tiny-cpu.toml",), "report": "r/tiny-cpu/report.html", "stages": (), "seconds": 1.0,
        "seconds_in_children": 0.9, "next_steps": ("autotune advise p", "autotune train --profile p"),
    }  # fmt: skip
    return TuningResult(**values | changes)


def worth(profile):
    rows = [
        RecipeRow(name=name, tokens_per_s=[900.0, 1000.0, 1100.0], speedup=speedup, outcome="ran")
        for name, speedup in (("paper", 2.0), ("hf-trainer", 1.25), ("tuned", None))
    ]  # fmt: skip
    baseline = BaselineEvidence(rows=rows, window_s=1.0, windows=9, seconds=9.0, local_ranks=1)
    return but(profile, evidence={"baseline": baseline})


def test_each_model_has_its_row_and_what_is_next_stands_last():
    text = tuning_text(result(), [worth(example_profile())])
    head, row, _, *rest = text.splitlines()
    assert head.split()[:3] == ["model", "fits", "(rows)"]
    assert row.split() == ["tiny", "2", "128", "x", "2", "rows", "1", "1,000", "1.25", "x", "2.00", "x"]
    assert rest == [
        "profile: p/tiny-cpu.toml", "report: r/tiny-cpu/report.html", "next: autotune advise p",
        "then: autotune train --profile p",
    ]  # fmt: skip


def test_what_was_not_measured_is_not_there_and_what_failed_is_said():
    bare = but(example_profile(), evidence={"workers": None})
    failed = Stage(name="workers", model="tiny", status="failed", summary="the window crashed")
    text = tuning_text(result(stages=(failed,), report=None), [bare])
    assert text.splitlines()[1].split()[-4:] == ["n/a"] * 4
    assert "not done: workers of tiny: the window crashed" in text
    assert "report:" not in text
    nothing = tuning_text(result(profiles=(), report=None, next_steps=(), stages=(failed,)), [])
    assert nothing == "not done: workers of tiny: the window crashed"  # and no table


def test_what_was_explored_is_told_under_the_models_name():
    explored = full_example("d").evidence.explore
    profile = but(worth(example_profile()), evidence={"explore": explored})
    text = tuning_text(result(), [profile, example_profile()])
    assert f"tiny, explored\n{textwrap.indent(exploration_text(explored), '  ')}\n" in text
    assert text.count(", explored") == 1
