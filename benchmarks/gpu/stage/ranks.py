"""Stage ``ranks``: what only several GPUs of a node can show. Measured with ``--nproc 2``; left out without.

What NCCL takes of a GPU's memory beside the allocator, how fast the link between the GPUs is, what it costs to compute
while messages travel, and that a trial in which one rank alone runs out of memory ends at once, with that said.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.cluster.together import on_this_node
from autotune.core.outcome import Measured, OutOfMemory, describe
from autotune.core.trial import LinkFigures, StepFigures, Trial
from autotune.decide.links import fit_link
from autotune.measure.together import TogetherMachine
from autotune.search.network import REPEATS, SIZE_SECONDS, SIZES_BYTES, has_trees
from autotune.search.probe import ProbeRequest, step_trial
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import Rig, TimeBox, TrialFailed
from benchmarks.gpu.stage.memory import Setting, request_for

ROWS = 8
STEPS = (2, 4)
TIMEOUT_S = 120.0
SMALL_SHARE = 0.5
"""Of what a rank needs, for the one that is to run out of memory."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """One rank beside several, the link, and a refusal on one rank.

    Raises:
        TrialFailed: If a trial did not come to what it must.
    """
    alone = _steps(rig, 1, box)
    together = _steps(rig, rig.nproc, box)
    sheet.measured("ranks_count", together.local_ranks)
    sheet.measured("one_rank_peak_bytes", alone.peak_bytes)
    sheet.measured("several_ranks_peak_bytes", together.peak_bytes)
    no_gpu = "a CPU has no such thing"
    outside = (alone.outside_allocator_bytes, together.outside_allocator_bytes)
    sheet.measured("one_rank_outside_allocator_bytes", outside[0], lacking=no_gpu)
    communication = None if outside[0] is None or outside[1] is None else max(0, outside[1] - outside[0])
    sheet.measured("communication_outside_allocator_bytes", communication, lacking=no_gpu)
    _write_refusal(rig, sheet, together, box)
    _write_links(rig, sheet, box)


def _request(rig: Rig, ranks: int) -> ProbeRequest:
    sizes = rig.sizes
    setting = Setting(
        model=sizes.model,
        precision=sizes.precision,
        card="whole",
        micro_batches=1,
        seq_length_tokens=sizes.seq_length_tokens,
    )
    used: Any = rig.site.device_used_bytes
    if rig.site.device == "cuda":
        used = [bytes_ or 0 for bytes_ in rig.site.used_bytes_by_gpu[:ranks]]
    return replace(request_for(rig.site, sizes, setting), local_ranks=ranks, device_used_before_bytes=used)


def _steps(rig: Rig, ranks: int, box: TimeBox) -> StepFigures:
    trial = replace(step_trial(_request(rig, ranks), ROWS, STEPS, None), timeout_s=TIMEOUT_S)
    figures = rig.figures(trial, f"ranks: {ranks} stepping together", box)
    return StepFigures.of(Measured(figures=figures))


def _write_refusal(rig: Rig, sheet: Sheet, together: StepFigures, box: TimeBox) -> None:
    """Limit the last rank's memory to less than it needs, and no other's."""
    peaks = together.peak_bytes_by_rank
    budgets = [2 * peak for peak in peaks[:-1]] + [round(SMALL_SHARE * peaks[-1])]
    trial = replace(step_trial(_request(rig, rig.nproc), ROWS, STEPS, None), timeout_s=TIMEOUT_S)
    # What limits a rank is no part of what is measured, so this trial has a name of its own in the ledger.
    trial = replace(
        trial,
        measured=trial.measured | {"attempt": "one rank refused"},
        place=trial.place | {"budget_bytes_by_rank": budgets},
    )
    started_s = rig.clock.monotonic_s()
    outcome = rig.runner(box).run(trial, "ranks: one of them out of memory")
    seconds = rig.clock.monotonic_s() - started_s
    if not isinstance(outcome, OutOfMemory):
        raise TrialFailed(f"a rank that is out of memory was to end the trial with that said: {describe(outcome)}")
    named = outcome.detail.startswith(f"rank {rig.nproc - 1} of {rig.nproc}: ")
    sheet.measured("one_rank_out_of_memory_named_count", int(named), expected=1)
    sheet.measured("one_rank_out_of_memory_s", seconds)


def _write_links(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    site = rig.site
    scratch = Path(tempfile.mkdtemp(prefix="together-", dir=rig.scratch))
    start = on_this_node(rig.nproc, site.versions["torch"])
    measured = {"sizes_bytes": list(SIZES_BYTES[rig.site.device]), "repeats": REPEATS, "seconds": SIZE_SECONDS}
    with TogetherMachine(start, site.device, scratch) as machine:
        trial = Trial(job="links", measured=measured, timeout_s=TIMEOUT_S)
        outcome = rig.runner(box, machine).run(trial, "ranks: the link between them")
    if not isinstance(outcome, Measured):
        raise TrialFailed(f"the link was not measured: {describe(outcome)}: {outcome.detail}")
    figures = LinkFigures.of(outcome)
    fit = fit_link(figures.within, figures.ranks_per_node, trees=has_trees(figures.backend))
    sheet.details["links"] = outcome.figures
    sheet.measured("link_bytes_per_s", fit.link.bytes_per_s)
    sheet.measured("link_latency_s", fit.link.latency_s)
    sheet.measured("computing_lost_while_messages_travel_share", figures.slowdown_share)
