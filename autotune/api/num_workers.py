"""``find_num_workers``: the fewest DataLoader workers that keep up with a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.api.amounts import seconds_of
from autotune.api.functions import importable_name, shown_name
from autotune.api.opened_bench import MeasuredIn, opened_bench
from autotune.api.shown_progress import Progress
from autotune.base.defaults import WINDOW_S
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.profile_paths import profile_paths
from autotune.subjects.own.subject import FunctionSubject
from autotune.subjects.subject import Argument
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.stage import sweep_on
from autotune.workers.windows import windows_of_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class NumWorkers:
    """Result of ``find_num_workers``; ``int()`` returns the number of workers."""

    value: int
    """Number of workers to use."""
    settings: Mapping[str, int | bool]
    """Arguments of the loader to use: ``num_workers``, and ``prefetch_factor`` and
    ``pin_memory`` if no number of workers was sufficient and other values are
    faster."""
    undecided_between: tuple[int, ...]
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    keeps_up: bool
    """True if the loader keeps up with the step."""
    ratio_to_cached: float
    """Throughput over that of the same step on cached batches."""
    worker_bytes: int | None
    """Private memory of the largest worker; None if there was none."""
    measured_in: MeasuredIn
    """Processes that ran the trials."""

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


def find_num_workers(
    build_loader: Callable[..., Any],
    *,
    step_time: str | float | None = None,
    build_step: Callable[..., Any] | None = None,
    max_workers: int | None = None,
    device: DeviceChoice = "auto",
    arguments: Mapping[str, Argument] | None = None,
    time_limit: str | float = "5min",
    window: str | float = WINDOW_S,
    reports: str | Path = "reports",
    progress: Progress = True,
) -> NumWorkers:
    """Find the fewest workers with which a loader of yours keeps up with a step.

    Args:
        build_loader: ``build_loader(num_workers)`` returns an iterable of batches.
        step_time: Duration of a step to replay, in seconds or as ``"120ms"``.
        build_step: Instead, a function that builds the step that consumes the batches;
            it may take a batch.
        max_workers: Most workers to try; None for one per available CPU core.
        device: Device for ``build_step``, as in ``find_batch_size``.
        arguments: Further arguments of both functions, such as ``micro_batch_size``.
        time_limit: Time budget; several numbers may remain undecided after it.
        window: Duration of one timed window.
        reports: Directory of the trial log.
        progress: True to show progress on standard error, False for none, or a function
            that gets the amount completed, the total amount (None if unknown), and a
            note.

    Raises:
        ValueError: Unless one of ``step_time`` and ``build_step`` is given.
        AutotuneError: If a function cannot be used, or a window fails.
    """
    if (step_time is None) == (build_step is None):
        raise ValueError(
            "find_num_workers needs step_time, such as '120ms', or build_step"
        )
    functions = {"loader": build_loader}
    if build_step is not None:
        functions["step"] = build_step
    names = {role: importable_name(function) for role, function in functions.items()}
    # A function without an importable name can only run here.
    runs_in_this_process = None in names.values()
    labels = {role: names[role] or shown_name(functions[role]) for role in functions}
    subject = FunctionSubject(
        step_function=labels.get("step"),
        loader_function=labels["loader"],
        arguments=dict(arguments or {}),
    )
    request = SweepRequest(
        reports=Path(reports),
        replayed_step_s=None if step_time is None else seconds_of(step_time),
        budget_s=seconds_of(time_limit),
        window_s=seconds_of(window),
        max_workers=max_workers,
    )
    with opened_bench(
        "cpu" if build_step is None else device,
        subject,
        request.trial_timeout_s,
        functions if runs_in_this_process else None,
        progress,
    ) as bench:
        (profile_path,) = profile_paths(None, [subject.name], bench.site.name)
        windows = windows_of_subject(subject, {}, request, bench)
        evidence, _ = sweep_on(bench, windows, profile_path)
    return _result(
        evidence, "this process" if runs_in_this_process else "fresh processes"
    )


def _result(evidence: WorkersEvidence, measured_in: MeasuredIn) -> NumWorkers:
    chosen_row = next(
        row for row in evidence.rows if row.num_workers == evidence.chosen
    )
    settings = evidence.loader_settings
    return NumWorkers(
        value=settings["num_workers"],
        settings=settings,
        undecided_between=tuple(evidence.undecided_between),
        keeps_up=evidence.keeps_up,
        ratio_to_cached=chosen_row.ratio_to_cached,
        worker_bytes=evidence.worker_bytes,
        measured_in=measured_in,
    )
