"""Stage ``endurance``: thousands of steps at the largest micro-batch, of which no allocation may be tried twice.

The largest micro-batch is found by trials of the worst case. What is tried here is whether it keeps fitting in a real
training: with the loop, the loaders and evaluation, and micro-batches of which no two are alike. The largest of
``bert-120m`` under the memory of an H100 NVL takes about a second for a step, so that 2,000 of them take more than half
an hour. Where there is less time, the same is done under a smaller limit of memory, and which limit it was is said.
"""

import statistics
from dataclasses import replace
from typing import Any

from autotune.core.outcome import Measured
from autotune.core.trial import StepFigures
from autotune.core.units import format_bytes
from autotune.decide.search import bracket, predict_bytes
from autotune.search.probe import ProbeRequest, Search, step_config
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox, TrialFailed, check_end, say
from benchmarks.gpu.stage.memory import SETTINGS, TINY, request_for

PROGRAM = "benchmarks.gpu.alone.steps"
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
    found, ended = _train(rig, request, rows, steps, box)
    done = found.get("optimizer_steps", 0)
    limit_bytes = request.memory_budget_bytes if request.device == "cuda" else None
    sheet.measured("peak_bytes", found.get("peak_bytes"), expected=limit_bytes, lacking="it did not come to its end")
    sheet.measured("step_median_s", found.get("step_median_s"), lacking="it did not come to its end")
    if found.get("refused"):
        sheet.measured("steps_without_retry_count", done)
        raise TrialFailed(f"{words}: after {done} steps: {found['refused']}")
    if done < wanted:
        reason = f"no time left for {wanted}: all of {done} went without a second try"
        sheet.missing("steps_without_retry_count", reason)
        if not ended.cut_off:
            check_end(ended)
        raise NoTimeLeft(reason)
    sheet.measured("steps_without_retry_count", done)
    check_end(ended)


def _train(rig: Rig, request: ProbeRequest, rows: int, steps: int, box: TimeBox) -> tuple[dict[str, Any], Ended]:
    """What a training of so many steps found, and how it ended."""
    settings = rig.scratch / "endurance.json"
    settings.write_text(step_config(request, rows).model_dump_json())
    words = ["--data", str(rig.data.resolve()), "--config", str(settings), "--steps", str(steps)]
    words += ["--budget-bytes", str(request.memory_budget_bytes)]
    used_bytes = rig.site.device_used_bytes
    words += [] if used_bytes is None else ["--used-before-bytes", str(used_bytes)]
    found, ended = rig.program(PROGRAM, words, box)
    return found.get("run", {}), ended


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
