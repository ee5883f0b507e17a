"""Evidence of a sweep of DataLoader workers, for the profile."""

import statistics
from typing import Any

from autotune.base.units import format_seconds
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.machine.measured_device import MeasuredDevice
from autotune.workers.decide.gpu_utilisation import utilisation_finding
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.gpu_figures import gpu_source, mean_gpu_use, operating_state
from autotune.workers.measure import WorkerSweep, largest_known
from autotune.workers.windows import SubjectWindows
from trainer.formats.gpu_activity import combine_known


def workers_evidence(
    sweep: WorkerSweep, choice: WorkersChoice, site: MeasuredDevice
) -> WorkersEvidence:
    """Return the evidence of a sweep; a joint search is not part of it.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        site: The measured machine. Its first disk is that of the dataset, if the
            subject has one.
    """
    windows = sweep.windows
    request = windows.request
    cached_windows = sweep.windows_with(None)
    all_windows = sweep.all_windows
    rows = [_row(sweep, choice, count) for count in sweep.counts]
    chosen_row = rows[sweep.counts.index(choice.workers)]
    cached_use = mean_gpu_use(cached_windows)
    evidence = WorkersEvidence(
        chosen=choice.workers,
        undecided_between=list(choice.undecided_between),
        keeps_up=choice.keeps_up,
        choice=_reason(sweep, choice),
        next_smaller=choice.next_smaller,
        max_workers=sweep.max_workers,
        max_workers_because=sweep.max_workers_because,
        unit=cached_windows[0].unit,
        counts_padding=cached_windows[0].counts_padding,
        cached_units_per_s=[window.padded_units_per_s for window in cached_windows],
        rows=rows,
        local_ranks=windows.limits.local_ranks,
        consumer=_consumer(windows),
        replayed_step_s=request.replayed_step_s,
        window_s=request.window_s,
        worker_bytes=sweep.worker_bytes,
        batch_bytes=sweep.batch_bytes,
        epoch_batches=largest_known(window.epoch_batches for window in all_windows),
        gpu_source=gpu_source(
            site, all_windows, replayed=request.replayed_step_s is not None
        ),
        operating_state=operating_state(cached_windows),
        utilisation_finding=utilisation_finding(
            chosen_row,
            keeps_up=choice.keeps_up,
            cached_utilisation_share=(
                None if cached_use is None else cached_use.utilisation_share
            ),
        ),
        **sweep.measurement.totals,
    )
    if not windows.inputs:
        # Your code reads its data from where it likes.
        return evidence
    disk = site.host.disks[0]
    return evidence.model_copy(
        update={
            "data_filesystem": disk.filesystem_type,
            "data_on_network": disk.is_network,
        }
    )


def _reason(sweep: WorkerSweep, choice: WorkersChoice) -> str:
    """Return the reason for the chosen count, and what is undecided, in words."""
    if not choice.undecided_between:
        return choice.proof
    between = " and ".join(map(str, choice.undecided_between))
    after = ""
    if sweep.time_is_over:
        after = f" after {format_seconds(sweep.budget_s)}"
    return (
        f"undecided between {between}{after};"
        f" num_workers={choice.workers}: {choice.proof}"
    )


def _consumer(windows: SubjectWindows[Any]) -> str:
    """Return the consumer of the batches, in words."""
    request = windows.request
    consumer = "your step" if windows.subject.code() else "the training step"
    if request.replayed_step_s is not None:
        consumer = f"a replayed step of {format_seconds(request.replayed_step_s)}"
    if request.sample_delay_s:
        delay = format_seconds(request.sample_delay_s)
        return f"{consumer}, each sample delayed by {delay}"
    return consumer


def _row(sweep: WorkerSweep, choice: WorkersChoice, count: int) -> WorkersRow:
    """Return the row of a measured count."""
    windows = sweep.windows_with(count)
    ratio = choice.ratios[count]
    return WorkersRow(
        num_workers=count,
        units_per_s=[window.padded_units_per_s for window in windows],
        ratio_to_cached=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        verdict=choice.verdicts[count],
        data_wait_share=statistics.median(window.data_wait_share for window in windows),
        processes=max(
            (window.processes for window in windows if window.processes is not None),
            default=None,
        ),
        memory_bytes=largest_known(window.memory_bytes for window in windows),
        model_flops_per_s_per_rank=[
            window.model_flops_per_s / window.local_ranks
            for window in windows
            if window.model_flops_per_s is not None
        ],
        storage_bytes_per_s=combine_known(
            statistics.median, (window.storage_bytes_per_s for window in windows)
        ),
        gpu=mean_gpu_use(windows),
    )
