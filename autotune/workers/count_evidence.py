"""Evidence of a sweep that the trainer's loader and your own have in common."""

import statistics
from typing import Any

from autotune.base.units import format_seconds
from autotune.workers.count_sweep import CountSweep, largest_known
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.gpu_figures import mean_gpu_use


def count_evidence_fields(
    sweep: CountSweep[Any], choice: WorkersChoice
) -> dict[str, Any]:
    """Return the fields of ``CountEvidence`` that follow from a sweep and its choice.

    The caller adds ``window_s``, ``gpu_source`` and ``replayed_step_s``, which are of
    the sweep's request and machine.
    """
    return {
        "chosen": choice.workers,
        "undecided_between": list(choice.undecided_between),
        "keeps_up": choice.keeps_up,
        "choice": _reason(sweep, choice),
        "next_smaller": choice.next_smaller,
        "max_workers": sweep.max_workers,
        "max_workers_because": sweep.max_workers_because,
        **sweep.measurement.totals,
    }


def _reason(sweep: CountSweep[Any], choice: WorkersChoice) -> str:
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


def count_row_fields(
    sweep: CountSweep[Any], choice: WorkersChoice, count: int
) -> dict[str, Any]:
    """Return the fields of ``CountRow``, of the windows with a measured count."""
    windows = sweep.windows_with(count)
    ratio = choice.ratios[count]
    return {
        "num_workers": count,
        "ratio_to_cached": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "verdict": choice.verdicts[count],
        "gpu": mean_gpu_use(windows),
        "data_wait_share": statistics.median(
            window.data_wait_share for window in windows
        ),
        "memory_bytes": largest_known(window.memory_bytes for window in windows),
    }
