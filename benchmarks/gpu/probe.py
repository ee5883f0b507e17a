"""Stage ``probe``: the largest micro-batch under one or two memory budgets, predicted bytes beside measured ones."""

from collections.abc import Sequence
from typing import Any

from autotune.core.outcome import Measured, OutOfMemory
from autotune.core.trial import FinishedTrial, StepFigures
from autotune.decide.posterior import Tried
from autotune.decide.search import bracket, predict_bytes
from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
from autotune.search.probe import ProbeRequest, ProbeResult, probe_model
from autotune.search.site import memory_budget
from autotune.search.trials import TrialRunner
from autotune.show.answers import fields_of
from autotune.show.answers.probe import probe_trial
from benchmarks.gpu.results import Sheet
from benchmarks.gpu.rig import NoTimeLeft, Rig, TimeBox, say
from benchmarks.gpu.sizes import H100_NVL_TOTAL_BYTES

HEADROOM_SHARE = 0.03
TRIAL_TIMEOUT_S = 120.0
FIRST_SHARE = 0.6
"""Of the stage's time, for the first budget; the second has what is left then."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Probe under each budget; what a probe had found when its time ran out is kept."""
    budgets = memory_budgets(rig)
    names = ", ".join(budgets)
    cut: list[NoTimeLeft] = []
    for number, (name, budget_bytes) in enumerate(budgets.items()):
        say(f"  budget {name} ({budget_bytes} bytes) of: {names}")
        part = box.part(FIRST_SHARE) if number + 1 < len(budgets) else box
        runner = rig.runner(part)
        result: ProbeResult | None = None
        try:
            result = probe_model(_request(rig, budget_bytes), runner)
        except NoTimeLeft as error:
            cut.append(error)
        finally:
            _write(sheet, name, budget_bytes, runner, result)
    if cut:
        raise cut[0]


def memory_budgets(rig: Rig) -> dict[str, int]:
    """Name to bytes: the whole device, and an H100 NVL's memory where there is more than that."""
    if rig.sizes.probe_budget_bytes is not None:
        return {"tiny_budget": rig.sizes.probe_budget_bytes}
    budgets = {"whole_device": memory_budget(rig.site, None)}
    if rig.site.gpu is not None and budgets["whole_device"] > H100_NVL_TOTAL_BYTES:
        budgets["as_h100_nvl"] = H100_NVL_TOTAL_BYTES
    return budgets


def _request(rig: Rig, budget_bytes: int) -> ProbeRequest:
    return ProbeRequest(
        settings=rig.settings,
        manifest=rig.manifest,
        seq_length_tokens=rig.sizes.seq_length_tokens,
        layout="packed",
        attention_dropout=0.0,  # as varlen kernels want it
        precision=rig.sizes.precision,
        device=rig.site.device,
        memory_budget_bytes=budget_bytes,
        headroom_share=HEADROOM_SHARE,
        max_rows=rig.sizes.max_rows,
        trial_timeout_s=TRIAL_TIMEOUT_S,
        device_used_before_bytes=rig.site.device_used_bytes,
        expected=expected_on_gpu(rig.site.gpu.compute_capability, 1) if rig.site.gpu else expected_on_cpu(),
    )


def _write(sheet: Sheet, name: str, budget_bytes: int, runner: TrialRunner, result: ProbeResult | None) -> None:
    """Write what the trials show, whether or not the probe came to its end."""
    tried = [one for one in map(_tried, _under(budget_bytes, runner.finished)) if one is not None]
    found = bracket(tried)
    feasible = found.feasible_max or None
    peak_bytes = max((one.peak_bytes or 0 for one in tried if one.rows == feasible), default=None)
    traced_bytes = result.traced_peak_bytes if result else None
    predicted_bytes = result.predicted_peak_bytes if result else None
    if predicted_bytes is None and feasible:
        predicted_bytes = predict_bytes(tried, feasible, None)
    nothing = "no trial fitted in the time there was"
    sheet.measured(f"{name}_feasible_max_rows", feasible, lacking=nothing)
    sheet.measured(f"{name}_infeasible_min_rows", found.infeasible_min, lacking="no size was refused in the time")
    sheet.measured(f"{name}_feasible_peak_bytes", peak_bytes, expected=predicted_bytes, lacking=nothing)
    sheet.predicted(
        f"{name}_feasible_peak_traced_bytes", traced_bytes, lacking=(result and result.not_traced) or nothing
    )
    sheet.predicted(f"{name}_feasible_peak_predicted_bytes", predicted_bytes, lacking="fewer than two smaller trials")
    sheet.measured(f"{name}_trials_s", runner.seconds)
    sheet.measured(f"{name}_trials_count", len(runner.finished))
    speed = max((point.slot_tokens_per_s for point in result.curve), default=None) if result else None
    sheet.measured(f"{name}_best_slot_tokens_per_s", speed, lacking="the probe did not come to its curve's end")
    sheet.details[name] = {
        "memory_budget_bytes": budget_bytes,
        "closed": found.closed,
        "complete": result is not None,
        "curve": [point.model_dump() for point in result.curve] if result else [],
        "trials": [_trial_details(done, tried) for done in runner.finished],
    }


def _under(budget_bytes: int, finished: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """The trials that asked whether a size fits; the last trials of a probe ask how fast it is."""
    return [
        done
        for done in finished
        if done.trial.measured["memory_budget_bytes"] == budget_bytes and not done.label.endswith("speed")
    ]


def _tried(done: FinishedTrial) -> Tried | None:
    rows = done.trial.measured["config"]["micro_batch_rows"]
    if isinstance(done.outcome, Measured):
        return Tried(rows=rows, fits=True, peak_bytes=StepFigures.of(done.outcome).peak_bytes)
    return Tried(rows=rows, fits=False) if isinstance(done.outcome, OutOfMemory) else None


def _trial_details(done: FinishedTrial, tried: Sequence[Tried]) -> dict[str, Any]:
    """A trial, with what the straight line through the smaller ones says of it."""
    row = fields_of(probe_trial(done))
    figures = StepFigures.of(done.outcome) if isinstance(done.outcome, Measured) else None
    return row | {
        "predicted_peak_bytes": predict_bytes(tried, row["rows"], None),
        "outside_allocator_bytes": figures.outside_allocator_bytes if figures else None,
        "step_s": list(figures.step_s) if figures else [],
    }
