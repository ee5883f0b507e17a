"""Stage ``endurance``: thousands of steps at the largest micro-batch, of which no allocation may be tried twice.

The largest micro-batch of ``bert-120m`` under the memory of an H100 NVL takes about a second for a step, so that 2,000
of them take more than half an hour. Where there is less time, the same is done under a smaller limit of memory: the
largest micro-batch that fits it is found, and trained at. What is tried is whether the largest size keeps fitting, so
the limit matters less than the number of steps; which limit it was is said.
"""

import statistics
from dataclasses import replace

from autotune.core.outcome import Measured, describe
from autotune.core.trial import StepFigures
from autotune.core.units import format_bytes
from autotune.decide.search import bracket, predict_bytes
from autotune.search.probe import Search, step_trial
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox, TrialFailed, say
from benchmarks.gpu.stage.memory import SETTINGS, TINY, request_for

STEPS_SHARE = 0.6
"""Of the time, that the steps are planned to take: a step of few rows takes longer than its share of one of many."""
SEARCH_SHARE = 0.4
"""Of the time, for finding the largest micro-batch."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Find the limit of memory that the time allows, and train on under it.

    Raises:
        TrialFailed: If a step failed.
        NoTimeLeft: If there was no time for all of them.
    """
    wanted = rig.sizes.endurance_steps
    search = _largest(rig, box.part(SEARCH_SHARE))
    step_s, rows = _step_s(search), bracket(search.tried).feasible_max
    affordable = int(rows * STEPS_SHARE * box.left_s / (wanted * step_s))
    if affordable < rows:
        search = _smaller(rig, search, max(1, affordable), box.part(SEARCH_SHARE))
        step_s, rows = _step_s(search), bracket(search.tried).feasible_max
    request = search.request
    steps = min(wanted, int(0.9 * box.left_s / step_s))
    words = f"{steps} steps of {rows} rows under {format_bytes(request.memory_budget_bytes)}"
    say(f"  {request.settings.name}: {words}")
    sheet.details |= {"model": request.settings.name, "rows": rows, "memory_budget_bytes": request.memory_budget_bytes}
    sheet.measured("rows_count", rows)
    sheet.measured("memory_budget_bytes", request.memory_budget_bytes)
    if steps < 1:
        raise NoTimeLeft("no time left for a single step")
    trial = step_trial(replace(request, trial_timeout_s=box.left_s), rows, (0, steps), request.memory_budget_bytes)
    outcome = rig.runner(box).run(trial, f"endurance: {words}")
    if not isinstance(outcome, Measured):
        sheet.measured("steps_without_retry_count", 0)
        raise TrialFailed(f"{words}: {describe(outcome)}: {outcome.detail}")
    figures = StepFigures.of(outcome)
    sheet.measured("peak_bytes", figures.peak_bytes, expected=request.memory_budget_bytes)
    sheet.measured("step_median_s", statistics.median(figures.step_s))
    if steps < wanted:
        reason = f"no time left for {wanted}: all of {steps} went without a second try"
        sheet.missing("steps_without_retry_count", reason)
        raise NoTimeLeft(reason)
    sheet.measured("steps_without_retry_count", figures.optimizer_steps)


def _largest(rig: Rig, box: TimeBox) -> Search:
    """What the stage of memory found, or found now."""
    if rig.largest is None:
        setting = (TINY if rig.sizes.name == "tiny" else SETTINGS)[0]
        rig.largest = _found(Search(request=request_for(rig.site, rig.sizes, setting), runner=rig.runner(box)))
    return rig.largest


def _smaller(rig: Rig, search: Search, rows: int, box: TimeBox) -> Search:
    """The largest micro-batch under what so many rows are expected to take."""
    more = [one for one in search.tried if one.peak_bytes is not None and one.rows >= rows]
    # Untraced, the next larger size that was tried is as near as can be known.
    expected_bytes = predict_bytes(search.tried, rows, search.prediction) or min(one.peak_bytes or 0 for one in more)
    smaller = Search(request=replace(search.request, memory_budget_bytes=expected_bytes), runner=rig.runner(box))
    smaller.estimate = search.estimate
    return _found(smaller)


def _found(search: Search) -> Search:
    search.predict()
    search.find()
    if not bracket(search.tried).feasible_max:
        raise TrialFailed(f"not even one row fits {format_bytes(search.request.memory_budget_bytes)}")
    return search


def _step_s(search: Search) -> float:
    """Median step of the largest size that fits."""
    rows = bracket(search.tried).feasible_max
    return statistics.median(
        second
        for done in search.runner.finished
        if isinstance(done.outcome, Measured) and done.trial.measured["config"]["micro_batch_rows"] == rows
        for second in StepFigures.of(done.outcome).step_s
    )
