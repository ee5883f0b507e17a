"""Where no number of workers feeds the step: workers, prefetching and pinning searched together by Optuna's TPE."""

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.core.evidence import JointChoice
from autotune.core.interval import Interval
from autotune.decide.statistics import ratio_of
from autotune.decide.workers import ENOUGH_SHARE, FIRST_ROUNDS, WorkersChoice
from autotune.search.study import loader_space, study_of
from autotune.search.workers import Asked, Sweep, WorkersDied, with_loader

if TYPE_CHECKING:
    import optuna

VERIFYING_ROUNDS = 12
"""The best of the search against the best of workers alone, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loader:
    workers: int
    prefetch: int
    pinned: bool

    @property
    def name(self) -> str:
        return f"{self.workers} loader workers, prefetch {self.prefetch}, {'' if self.pinned else 'not '}pinned"


def gap_remains(choice: WorkersChoice) -> bool:
    """Whether even the best count leaves a proven gap to batches from memory, and waits for data."""
    if choice.fed:
        return False
    best = max(choice.ratios.values(), key=lambda ratio: ratio.value)
    return best.high is not None and best.high < ENOUGH_SHARE


def search_joint(sweep: Sweep, choice: WorkersChoice, trials: int) -> JointChoice | None:
    """Search, then hold the best against the best of workers alone, window by window.

    Args:
        sweep: Finished, and with time left.
        choice: What it came to.
        trials: Of the search, each a window beside one of batches from memory.

    Returns:
        What was found; None where time or space leave nothing to try.
    """
    data = sweep.request.config.data
    baseline = _Loader(workers=choice.workers, prefetch=data.prefetch_batches, pinned=data.pin_memory)
    on_gpu = sweep.request.config.device == "cuda" and sweep.request.replayed_step_s is None
    number, values = _search(sweep, baseline, trials, on_gpu=on_gpu)
    tried = sum(map(len, values.values()))
    values.pop(baseline, None)
    if not values:
        return None
    candidate = max(values, key=lambda loader: statistics.fmean(values[loader]))
    try:
        ratio = _verify(sweep, number, candidate, baseline)
    except WorkersDied:  # what ran once and dies later is no setting to train with
        return None
    return JointChoice(
        trials=tried,
        loader_workers=candidate.workers,
        prefetch_batches=candidate.prefetch,
        pin_memory=candidate.pinned,
        ratio_to_workers_alone=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        adopted=ratio.low is not None and ratio.low > 1.0,
    )


def _search(sweep: Sweep, baseline: _Loader, trials: int, *, on_gpu: bool) -> tuple[int, dict[_Loader, list[float]]]:
    """The number of the next round, and the ratios to the ceiling of what was tried."""
    space = loader_space(sweep.max_workers, pinning=on_gpu)
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=on_gpu)
    number, values = len(sweep.rounds), dict[_Loader, list[float]]()
    for _ in range(trials):
        if sweep.time_is_over:
            break
        trial = study.ask(fixed_distributions=space)
        loader = _loader_of(trial.params, baseline)
        limits = replace(sweep.request.limits, prefetch_batches=loader.prefetch)
        if limits.refusal(loader.workers, sweep.worker_bytes) is not None:
            _tell_refused(study, trial)
            continue
        try:
            ceiling, found = sweep.read_round(number, [_asked(sweep, baseline, cached=True), _asked(sweep, loader)])
        except WorkersDied:
            _tell_refused(study, trial)
            continue
        value = found.slot_tokens_per_s / ceiling.slot_tokens_per_s
        study.tell(trial, value)
        values.setdefault(loader, []).append(value)
        number += 1
    return number, values


def _tell_refused(study: "optuna.Study", trial: "optuna.Trial") -> None:
    from optuna.trial import TrialState

    study.tell(trial, state=TrialState.FAIL)


def _verify(sweep: Sweep, number: int, candidate: _Loader, baseline: _Loader) -> Interval:
    """Windows of both in turn, until they differ or enough of them do not."""
    pairs: list[tuple[float, float]] = []
    while True:
        found = sweep.read_round(number, [_asked(sweep, candidate), _asked(sweep, baseline)])
        pairs.append((found[0].slot_tokens_per_s, found[1].slot_tokens_per_s))
        number += 1
        ratio = ratio_of(pairs)
        differs = ratio.low is not None and ratio.high is not None and not ratio.low <= 1.0 <= ratio.high
        if len(pairs) >= VERIFYING_ROUNDS or (len(pairs) >= 2 * FIRST_ROUNDS and differs) or sweep.time_is_over:
            return ratio


def _loader_of(params: dict[str, Any], baseline: _Loader) -> _Loader:
    return _Loader(
        workers=params["loader_workers"],
        prefetch=params["prefetch_batches"],
        pinned=params.get("pin_memory", baseline.pinned),
    )


def _asked(sweep: Sweep, loader: _Loader, *, cached: bool = False) -> Asked:
    config = with_loader(sweep.request.config, workers=loader.workers, prefetch=loader.prefetch, pinned=loader.pinned)
    return Asked(name="batches from memory" if cached else loader.name, config=config, cached=cached)
