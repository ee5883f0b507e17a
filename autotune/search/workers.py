"""Sweep the number of loader processes: real training steps, interleaved repeats, the study kept by Optuna.

Slot tokens are compared, padding included: a step costs the same whatever its rows hold, while the real tokens of a
window depend on which samples fell into it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.core.hardware import GpuSample, window
from autotune.core.outcome import Measured, describe
from autotune.core.profile import WorkersEvidence, WorkersRow
from autotune.core.trial import FeedFigures, Trial
from autotune.decide.choose import KNEE_SHARE, choose_workers
from autotune.errors import Undecided
from autotune.search.trials import TrialRunner
from trainer.config import TrainConfig

if TYPE_CHECKING:
    import optuna

PARAMETER = "loader_workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What to sweep."""

    config: TrainConfig
    data_dir: str
    max_workers: int
    repeats: int
    window_s: float
    trial_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    figures: FeedFigures
    sampled: bool
    """Whether it ran now, beside the GPU samples; a window from the ledger belongs to another hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeries:
    """Utilisation samples of the sweep, and where they come from or why there are none."""

    source: str
    samples: Callable[[], Sequence[GpuSample]] = field(default=lambda: ())


def sweep_workers(request: SweepRequest, runner: TrialRunner, gpu: GpuSeries) -> WorkersEvidence:
    """Measure the ceiling, climb the ladder until the loader no longer costs, then repeat what was climbed.

    Raises:
        Undecided: If a window could not be measured.
    """
    study = _study()
    ceiling = [_measure(request, runner, None, 0)]
    windows: dict[int, list[_Window]] = {}
    for workers in ladder(request.max_workers):
        windows[workers] = [_asked(study, request, runner, workers, 0)]
        if windows[workers][0].figures.slot_tokens_per_s >= KNEE_SHARE * ceiling[0].figures.slot_tokens_per_s:
            break
    for repeat in range(1, request.repeats):
        ceiling.append(_measure(request, runner, None, repeat))
        for workers, repeats in windows.items():
            repeats.append(_asked(study, request, runner, workers, repeat))
    return _evidence(windows, ceiling, runner, gpu)


def ladder(max_workers: int) -> list[int]:
    """0, 1, 2, 4, … and the largest allowed."""
    rungs = [0, *(2**exponent for exponent in range(max_workers.bit_length()))]
    return sorted({rung for rung in rungs if rung <= max_workers} | {max_workers})


def feed_trial(request: SweepRequest, workers: int | None, repeat: int) -> Trial:
    """A window of training with so many loader processes; None takes batches that lie in memory."""
    data = request.config.data.model_copy(update={"loader_workers": workers or 0})
    config = request.config.model_copy(update={"data": data})
    measured = {
        "config": config.model_dump(mode="json"),
        "cached": workers is None,
        "window_s": request.window_s,
        "min_steps": 3,
        "repeat": repeat,
    }
    return Trial(job="feed", measured=measured, place={"data_dir": request.data_dir}, timeout_s=request.trial_timeout_s)


def _study() -> "optuna.Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", study_name=PARAMETER)


def _asked(study: "optuna.Study", request: SweepRequest, runner: TrialRunner, workers: int, repeat: int) -> _Window:
    """Ask the study for this rung, measure it, tell the result; a window from the ledger is told the same way."""
    study.enqueue_trial({PARAMETER: workers}, user_attrs={"repeat": repeat})
    trial = study.ask()
    measured = _measure(request, runner, trial.suggest_int(PARAMETER, 0, request.max_workers), repeat)
    study.tell(trial, measured.figures.slot_tokens_per_s)
    return measured


def _measure(request: SweepRequest, runner: TrialRunner, workers: int | None, repeat: int) -> _Window:
    name = "cached batches" if workers is None else f"{workers} loader workers"
    label = f"{name}, repeat {repeat + 1} of {request.repeats}"
    outcome = runner.run(feed_trial(request, workers, repeat), label)
    if isinstance(outcome, Measured):
        return _Window(figures=FeedFigures.of(outcome), sampled=not runner.finished[-1].from_ledger)
    raise Undecided(
        f"the window of {label} {describe(outcome)}:\n{outcome.detail}",
        next_step=f"Mend that and run the same command: it resumes from {runner.ledger.directory}.",
    )


def _evidence(
    windows: dict[int, list[_Window]], ceiling: list[_Window], runner: TrialRunner, gpu: GpuSeries
) -> WorkersEvidence:
    choice = choose_workers(
        {workers: [found.figures.slot_tokens_per_s for found in repeats] for workers, repeats in windows.items()}
    )
    samples = gpu.samples()
    rows = [
        WorkersRow(
            loader_workers=workers,
            slot_tokens_per_s=[found.figures.slot_tokens_per_s for found in repeats],
            ratio_to_best=choice.ratios[workers].value,
            ratio_low=choice.ratios[workers].low,
            ratio_high=choice.ratios[workers].high,
            data_wait_share=statistics.median(found.figures.data_wait_share for found in repeats),
            gpu_utilisation=_utilisation(samples, repeats),
        )
        for workers, repeats in windows.items()
    ]
    return WorkersEvidence(
        chosen=choice.workers,
        undecided_between=list(choice.undecided_between),
        ceiling_slot_tokens_per_s=[found.figures.slot_tokens_per_s for found in ceiling],
        rows=rows,
        seconds=runner.seconds,
        gpu_utilisation_source=gpu.source,
        choice=choice.reason,
    )


def _utilisation(samples: Sequence[GpuSample], windows: Sequence[_Window]) -> float | None:
    """Mean utilisation over the windows that ran beside the samples; None where there are none."""
    inside = [
        sample.utilisation
        for found in windows
        if found.sampled
        for sample in window(samples, found.figures.window_start_s, found.figures.window_end_s)
        if sample.utilisation is not None
    ]
    return statistics.fmean(inside) if inside else None
