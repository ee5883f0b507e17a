"""Probe of a subject: verify the largest size, then measure the throughput of sizes.

The largest size is verified on both sides: it ran under the memory budget, and the next
one ran out of memory. Smaller sizes give the throughput curve.
"""

import statistics
from collections.abc import Sequence

from autotune.base.units import format_bytes
from autotune.errors import ExceedsMemory, OutOfTime
from autotune.evidence.probe import ProbeEvidence, SizeRow
from autotune.memory.decide.batch_search import SizeTrial, predict_bytes
from autotune.memory.decide.sharding import smallest_sharding
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.recorded_contents import RecordedContents, record_contents
from autotune.memory.size_probe import SizeProbe
from autotune.memory.size_search import SizeSearch
from autotune.memory.throughput import Throughput, measure_throughput
from autotune.memory.values import ACTIVATIONS, MemoryBreakdown
from autotune.profiles.decide.knee import knee_interval
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured, describe
from autotune.trials.runner import TrialRunner

_MAX_DETAIL_CHARACTERS = 300
"""Characters of a failure that an error quotes, from its end."""


def probe_subject(
    probe: SizeProbe,
    runner: TrialRunner,
    host_available_bytes: int,
    traced: MemoryEstimate | None = None,
) -> tuple[int, ProbeEvidence]:
    """Find and verify the largest size, and measure the throughput curve.

    Every trial is a fresh process, unless the probe is of this process.

    Args:
        probe: The subject and its limits.
        runner: Runs the trials.
        host_available_bytes: Memory of the host that is available.
        traced: Prediction from a trace, if known.

    Returns:
        The chosen size, and the evidence for it.

    Raises:
        ExceedsMemory: If not even the smallest size fits.
        BadInput: If the step cannot be probed.
        OutOfTime: If time ended before any size fitted. If it ends later, the evidence
            is marked as a lower bound, or has no throughput.
        Undecided: If trials failed for another reason than memory.
    """
    search = SizeSearch(
        probe=probe,
        runner=runner,
        host_available_bytes=host_available_bytes,
        estimate=traced,
    )
    try:
        size, evidence = _measure(search)
        search.study.end(evidence, size)
    finally:
        search.study.fail_running()
    return size, evidence


def _measure(search: SizeSearch) -> tuple[int, ProbeEvidence]:
    """Return what ``probe_subject`` does, by a search that has not begun."""
    search.predict()
    is_lower_bound = False
    try:
        search.find()
    except OutOfTime:
        if not search.feasible_max:
            raise
        # The largest size that ran is still worth reporting.
        is_lower_bound = True
    if not search.feasible_max:
        raise explain_too_large(search)
    throughput = measure_throughput(
        search.probe, search.runner, search.feasible_max, search.study
    )
    contents = record_contents(search)
    # Made last, as the evidence has the time of all trials.
    evidence = _evidence(search, throughput, contents, is_lower_bound=is_lower_bound)
    return throughput.choice.micro_batch_size, evidence


def explain_too_large(search: SizeSearch) -> ExceedsMemory:
    """Run the smallest size with a wider limit, and return an error with its memory.

    The error is for a step of which not even the smallest size fits. If it was traced,
    it also names the largest term of the predicted memory, and remedies.
    """
    probe, outcome = search.probe, search.look(1)
    message = (
        f"{search.name} exceeds the memory budget of"
        f" {format_bytes(probe.memory_budget_bytes)} at {search.words(1)}"
    )
    if isinstance(outcome, Measured):
        needed_bytes = StepFigures.of(outcome).peak_bytes
        message += f"; it needs {format_bytes(needed_bytes)}"
    else:
        detail = outcome.detail.strip()[-_MAX_DETAIL_CHARACTERS:]
        message += f"; with a wider limit: {detail or describe(outcome)}"
    breakdown = search.breakdown(probe.multiple_of)
    if breakdown is not None:
        # With the predicted total, as this term may exceed the measured peak.
        term = breakdown.largest_term
        message += (
            f"; largest part: {term}, {format_bytes(breakdown.terms_bytes[term])} of"
            f" {format_bytes(breakdown.peak_bytes)} predicted"
        )
    *remedies, last_remedy = _remedies(search, breakdown)
    return ExceedsMemory(
        message, next_step=f"{', '.join(remedies).capitalize()}, or {last_remedy}."
    )


def _remedies(search: SizeSearch, breakdown: MemoryBreakdown | None) -> list[str]:
    """Return what may make the smallest size fit, given its predicted memory."""
    probe = search.probe
    remedies = ["raise --memory", "shorten the sequences", "choose a smaller model"]
    settings = probe.subject.apply({})
    checkpointing = settings.get("activation_checkpointing")
    if checkpointing is None:
        return [*remedies, "use activation checkpointing"]
    if breakdown is None:
        return remedies
    if breakdown.largest_term.startswith(ACTIVATIONS) and checkpointing != "full":
        remedies.insert(0, "add --activation-checkpointing full")
    # With several ranks, any strategy but DDP has sharded the traced state already.
    strategy = settings.get("parallel", {}).get("strategy")
    is_whole_state = strategy == "ddp" or probe.local_ranks == 1
    if search.estimate is not None and is_whole_state:
        sharding = smallest_sharding(
            breakdown.terms_bytes,
            probe.memory_budget_bytes,
            largest_layer_bytes=search.estimate.memory_model.largest_parameter_bytes,
        )
        if sharding is not None:
            remedies.append(f"shard the state: {sharding}")
    return remedies


def _evidence(
    search: SizeSearch,
    throughput: Throughput,
    contents: RecordedContents,
    *,
    is_lower_bound: bool,
) -> ProbeEvidence:
    """Return the result of a finished probe.

    Args:
        search: Search that found a size that fits.
        throughput: Throughput by size, and the chosen size.
        contents: Contents of memory, as far as they were requested.
        is_lower_bound: True if time ended before the largest size was verified.
    """
    probe, unit = search.probe, search.probe.multiple_of
    largest = search.feasible_max // unit
    figures = search.figures[largest]
    traced_peak_bytes = traced_max = parameters = None
    if search.estimate is not None:
        traced_max = search.estimate.max_micro_batch_size
        parameters = search.estimate.parameters
        if search.prediction is not None:
            traced_peak_bytes = round(search.prediction.peak_bytes(largest))
    breakdown = search.breakdown(search.feasible_max)
    return ProbeEvidence(
        feasible_max=search.feasible_max,
        infeasible_min=search.infeasible_min,
        is_lower_bound=is_lower_bound,
        feasible_peak_bytes=_highest_peak_bytes(search.tried, largest),
        predicted_peak_bytes=predict_bytes(search.tried, largest, search.prediction),
        traced_peak_bytes=traced_peak_bytes,
        traced_micro_batch_size=traced_max,
        traced_terms_bytes={} if breakdown is None else dict(breakdown.terms_bytes),
        parameters=parameters,
        not_traced=search.not_traced,
        kept_bytes=figures.kept_bytes[-1] if figures.kept_bytes else None,
        host_peak_bytes=figures.host_peak_bytes,
        optimizer_steps=figures.optimizer_steps,
        trains=figures.trains,
        settings=dict(figures.settings),
        multiple_of=unit,
        varies_bytes=search.varies_bytes,
        verified_in="this process" if probe.in_this_process else "fresh processes",
        sizes=_rows(search),
        local_ranks=probe.local_ranks,
        gradient_accumulation_steps=probe.micro_batches,
        search_trials=len(search.tried),
        seconds=round(search.runner.seconds, 3),
        mean_tokens_per_sequence=probe.tokens_per_size,
        curve=throughput.curve,
        knee_micro_batch_sizes=list(knee_interval(throughput.curve) or ()),
        dip=throughput.dip,
        sustained=throughput.sustained,
        contents=contents.largest,
        refused_contents=contents.refused,
        contents_not_recorded=contents.not_recorded,
        choice=throughput.choice.reason,
    )


def _rows(search: SizeSearch) -> list[SizeRow]:
    """Return the trials that decided, in their order."""
    rows = []
    for trial in search.tried:
        if trial.fits is None:
            continue
        size = trial.micro_batch_size
        step_s = None
        if trial.fits and search.runner.measures_time:
            step_s = statistics.median(search.figures[size].step_s) or None
        rows.append(
            SizeRow(
                size=size * search.probe.multiple_of,
                fits=trial.fits,
                peak_bytes=trial.peak_bytes,
                step_s=step_s,
            )
        )
    return rows


def _highest_peak_bytes(tried: Sequence[SizeTrial], size: int) -> int:
    """Return the peak memory of a size: the highest of its trials that fitted."""
    return max(
        trial.peak_bytes
        for trial in tried
        if trial.micro_batch_size == size and trial.peak_bytes is not None
    )
