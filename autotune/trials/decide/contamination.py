"""Rules by which a trial's outcome is discarded. Pure.

Other programs on a GPU, heat and hardware slowdowns distort a measurement. Process ids
do not identify the owner of memory, as a container sees other ids than the host. So the
memory in use is compared with a baseline from before this program used the GPU; listed
processes are only a hint in messages.
"""

from collections import Counter
from collections.abc import Sequence

from autotune.base.units import format_bytes, format_seconds
from autotune.machine.decide import MAX_UNEXPLAINED_GPU_BYTES
from autotune.machine.values import throttle_faults
from autotune.trials.outcomes import Contaminated, Measured, Outcome, OutOfMemory
from trainer.formats.gpus import GpuProcess, GpuSample, Unavailable

MEMORY_TOLERANCE_BYTES = 64 * 2**20
"""Tolerated growth of an idle GPU's used memory: the driver changes it by a few MiB, a
CUDA context by hundreds."""
MOST_SLOWED_SHARE = 0.1
"""Largest tolerated share of samples with a fault: intact air-cooled GPUs slow down for
a moment now and then."""

Holders = tuple[GpuProcess, ...] | Unavailable
"""Processes that the driver lists on a GPU, or the reason why it lists none."""


def is_above_baseline(
    baseline_bytes: int | Unavailable, used_bytes: int | Unavailable
) -> bool:
    """Return whether more memory is in use than before this program used the GPU.

    Args:
        baseline_bytes: Memory in use on the GPU before this program used it.
        used_bytes: Memory in use on the GPU now.

    Returns:
        True beyond ``MEMORY_TOLERANCE_BYTES``; False if either figure is missing.
    """
    if isinstance(baseline_bytes, Unavailable) or isinstance(used_bytes, Unavailable):
        return False
    return used_bytes - baseline_bytes > MEMORY_TOLERANCE_BYTES


def describe_growth(
    gpu: str,
    used_bytes: int | Unavailable,
    holders: Holders,
    baseline_bytes: int | Unavailable,
    waited_s: float,
) -> str:
    """Describe the memory of a GPU that was not freed, and the processes on the GPU.

    Args:
        gpu: Name of the GPU.
        used_bytes: Memory in use on the GPU now.
        holders: Processes on the GPU now.
        baseline_bytes: Memory in use on the GPU before this program used it.
        waited_s: Time for which the memory was expected to be freed.
    """
    return (
        f"{gpu} still holds {_bytes_text(used_bytes)} after a wait of"
        f" {format_seconds(waited_s)}, up from {_bytes_text(baseline_bytes)} before the"
        f" first trial ({_holders_text(holders)})"
    )


def describe_slowdown(gpu: str, samples: Sequence[GpuSample]) -> str | None:
    """Describe the faults, heat or hardware slowdown, that lowered a GPU's clocks.

    A power cap is no fault.

    Args:
        gpu: Name of the GPU.
        samples: Samples of the GPU during a trial.

    Returns:
        The description, or None if the samples show no more faults than are tolerated.
    """
    faults_by_sample = [
        throttle_faults(sample.throttle_reasons)
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    slowed_samples = sum(bool(faults) for faults in faults_by_sample)
    if _is_tolerated(slowed_samples, len(faults_by_sample)):
        return None
    count_by_fault: Counter[str] = Counter()
    for faults in faults_by_sample:
        count_by_fault.update(faults)
    counts = ", ".join(
        f"{fault} in {count} of {len(faults_by_sample)} samples"
        for fault, count in count_by_fault.items()
    )
    temperatures_c = [
        sample.temperature_c for sample in samples if sample.temperature_c is not None
    ]
    heat = f", at up to {max(temperatures_c)} °C" if temperatures_c else ""
    return f"{gpu} was slowed down: {counts}{heat}"


def _is_tolerated(slowed_samples: int, samples: int) -> bool:
    """Return whether so few of all samples show a fault that it does not matter.

    Up to ``MOST_SLOWED_SHARE`` of the samples may, or a single one of several. A
    slowdown in every sample is never tolerated, however few samples there are.
    """
    if slowed_samples == 0:
        return True
    if slowed_samples == samples:
        return False
    return slowed_samples <= max(1, MOST_SLOWED_SHARE * samples)


def describe_other_processes(gpu: str, samples: Sequence[GpuSample]) -> str | None:
    """Describe processes that computed on a GPU beside the trial's own one.

    Returns:
        The description, or None if no sample has more than one process.
    """
    process_counts = [
        sample.process_count for sample in samples if sample.process_count is not None
    ]
    shared_samples = sum(count > 1 for count in process_counts)
    if not shared_samples:
        return None
    return (
        f"another process used {gpu}: {max(process_counts)} processes in"
        f" {shared_samples} of {len(process_counts)} samples"
    )


def discard_if_disturbed(outcome: Outcome, reasons: Sequence[str]) -> Outcome:
    """Return the outcome, or ``Contaminated`` if there are reasons to discard it.

    Only figures and an out of memory are discarded; other failures have no figures that
    could be wrong.
    """
    if reasons and isinstance(outcome, Measured | OutOfMemory):
        return Contaminated(detail="; ".join(reasons))
    return outcome


def describe_other_users(
    gpu: str, used_bytes: int | Unavailable, holders: Holders
) -> str | None:
    """Describe the use of a GPU by others, before this program uses it.

    Returns:
        The description, or None if no process is listed and the memory in use may be
        the driver's reserve.
    """
    has_holders = not isinstance(holders, Unavailable) and bool(holders)
    exceeds_reserve = (
        not isinstance(used_bytes, Unavailable)
        and used_bytes > MAX_UNEXPLAINED_GPU_BYTES
    )
    if not has_holders and not exceeds_reserve:
        return None
    return (
        f"{gpu} is already in use: {_bytes_text(used_bytes)} allocated"
        f" ({_holders_text(holders)})"
    )


def _holders_text(holders: Holders) -> str:
    """Return the processes and their memory, or the reason why none is listed."""
    if isinstance(holders, Unavailable):
        return f"processes cannot be listed: {holders.reason}"
    if not holders:
        return "no visible process, perhaps another user's"
    return ", ".join(
        f"pid {process.pid}: {format_bytes(process.used_bytes)}" for process in holders
    )


def _bytes_text(used_bytes: int | Unavailable) -> str:
    """Return a size with its unit, or ``n/a`` if it is missing."""
    return format_bytes(None if isinstance(used_bytes, Unavailable) else used_bytes)
