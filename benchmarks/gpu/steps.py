"""Stage ``train``: optimizer steps at a moderate micro-batch, and what the GPU's counters say during them."""

import statistics

from autotune.core.trial import StepFigures
from autotune.search.probe import ProbeRequest, step_trial
from benchmarks.gpu.results import Sheet
from benchmarks.gpu.rig import Rig, TimeBox
from benchmarks.gpu.watch import write_readings

WARM_UP_STEPS = 3
TRIAL_TIMEOUT_S = 120.0
ENDING_S = 2.0
"""A trial's process ends within this after its last step."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Train on random full rows without a memory limit."""
    sizes = rig.sizes
    request = ProbeRequest(
        settings=rig.settings,
        manifest=rig.manifest,
        seq_length_tokens=sizes.seq_length_tokens,
        layout="packed",
        attention_dropout=0.0,  # as varlen kernels want it
        precision=sizes.precision,
        device=rig.site.device,
        memory_budget_bytes=1,  # not used: the trial below has no limit
        headroom_share=0.0,
        max_rows=sizes.train_rows,
        trial_timeout_s=TRIAL_TIMEOUT_S,
        device_used_before_bytes=rig.site.device_used_bytes,
    )
    trial = step_trial(request, sizes.train_rows, (WARM_UP_STEPS, sizes.train_steps), None)
    with rig.watch() as watch:
        measured = rig.figures(trial, f"train: {sizes.train_rows} rows of {sizes.model}", box)
        ended_s = rig.clock.monotonic_s()
    figures = StepFigures(**measured | {"step_s": tuple(measured["step_s"])})
    step_s = statistics.median(figures.step_s)
    sheet.details |= {
        "model": sizes.model,
        "precision": sizes.precision,
        "rows_per_microbatch": sizes.train_rows,
        "seq_length_tokens": sizes.seq_length_tokens,
        "step_s": list(figures.step_s),
        "loss": figures.loss,
    }
    sheet.measured("slot_tokens_per_s", figures.slot_tokens_per_step / step_s)
    sheet.measured("step_median_s", step_s)
    sheet.measured("step_fastest_s", min(figures.step_s))
    sheet.measured("step_slowest_s", max(figures.step_s))
    sheet.measured("peak_bytes", figures.peak_bytes)
    sheet.measured("outside_allocator_bytes", figures.outside_allocator_bytes, lacking="a CPU has no such thing")
    # Between timed steps the next batch is made, so they began no later than their sum before the trial's end.
    write_readings(sheet, "train", watch, ended_s - sum(figures.step_s), ended_s - ENDING_S, busy_share=None)
