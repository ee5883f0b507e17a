"""Evidence of a sweep of the trainer's own DataLoader, for the profile."""

import statistics

from autotune.base.units import format_seconds
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.machine.measured_device import MeasuredDevice
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.count_evidence import count_evidence_fields, count_row_fields
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.gpu_figures import gpu_source, operating_state
from autotune.workers.measure import Sweep
from trainer.formats.gpu_activity import combine_known


def workers_evidence(
    sweep: Sweep, choice: WorkersChoice, site: MeasuredDevice
) -> WorkersEvidence:
    """Return the evidence of a sweep; a joint search is not part of it.

    Args:
        sweep: Finished sweep.
        choice: Choice of the sweep.
        site: The measured machine, with the disk of the dataset.
    """
    request = sweep.training.request
    disk = site.host.disks[0]
    cached_windows = sweep.windows_with(None)
    return WorkersEvidence(
        **count_evidence_fields(sweep, choice),
        cached_padded_tokens_per_s=[
            window.padded_tokens_per_s for window in cached_windows
        ],
        rows=[_row(sweep, choice, count) for count in sweep.counts],
        local_ranks=sweep.training.limits.local_ranks,
        consumer=_consumer(request),
        replayed_step_s=request.replayed_step_s,
        window_s=request.window_s,
        data_filesystem=disk.filesystem_type,
        data_on_network=disk.is_network,
        gpu_source=gpu_source(
            site, sweep.all_windows, replayed=request.replayed_step_s is not None
        ),
        operating_state=operating_state(cached_windows),
    )


def _consumer(request: SweepRequest) -> str:
    """Return the consumer of the batches, in words."""
    consumer = "the training step"
    if request.replayed_step_s is not None:
        consumer = f"a replayed step of {format_seconds(request.replayed_step_s)}"
    if request.sample_delay_s:
        delay = format_seconds(request.sample_delay_s)
        return f"{consumer}, each sample delayed by {delay}"
    return consumer


def _row(sweep: Sweep, choice: WorkersChoice, count: int) -> WorkersRow:
    """Return the row of a measured count."""
    windows = sweep.windows_with(count)
    return WorkersRow(
        **count_row_fields(sweep, choice, count),
        padded_tokens_per_s=[window.padded_tokens_per_s for window in windows],
        model_flops_per_s_per_rank=[
            window.model_flops_per_s / window.local_ranks
            for window in windows
            if window.model_flops_per_s is not None
        ],
        storage_bytes_per_s=combine_known(
            statistics.median, (window.storage_bytes_per_s for window in windows)
        ),
    )
