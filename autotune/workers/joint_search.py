"""Joint search over workers, prefetching and pinning by Optuna's TPE, if no number of workers is sufficient."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.base.interval import Interval
from autotune.base.statistics import paired_ratio
from autotune.trials.values import FinishedTrial, Measured, TrainingFigures
from autotune.workers.count_sweep import WorkersDied
from autotune.workers.decide.worker_count import (
    ENOUGH_SHARE,
    FIRST_ROUNDS,
    WorkersChoice,
)
from autotune.workers.measure import Sweep, training_trial
from autotune.workers.values import JointChoice, TrainingRequest
from trainer.config.train_config import DataSettings, Tag, tagged

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PREFETCH_CHOICES = (1, 2, 4, 8)
MOST_TRIALS = 12
VERIFYING_ROUNDS = 12
"""Limit of rounds that compare the best of the search with the best number of workers
alone."""


def gap_remains(choice: WorkersChoice) -> bool:
    """Return True if even the best count is below cached batches at 98 % confidence, and waits for data."""
    best = max(choice.ratios.values(), key=lambda ratio: ratio.value)
    return not choice.keeps_up and best.high is not None and best.high < ENOUGH_SHARE


def search_joint(
    sweep: Sweep, choice: WorkersChoice, trials: int = MOST_TRIALS
) -> JointChoice | None:
    """Search after a sweep, then compare the best with the best number of workers alone in interleaved windows.

    Each of the ``trials`` is a window next to one on cached batches. Return None if no
    setting was tried.
    """
    alone = sweep.training.config.data.model_copy(
        update={"num_workers": choice.workers}
    )
    values = _search(sweep, alone, trials)
    tried = sum(map(len, values.values()))
    values.pop(alone, None)
    if not values:
        return None
    candidate = max(values, key=lambda data: statistics.fmean(values[data]))
    try:
        ratio = _verify(sweep, len(sweep.rounds) + tried, candidate, alone)
    except WorkersDied:  # it ran once, but is not safe to train with
        return None
    told: dict[str, Any] = {
        name: getattr(candidate, name) for name in tagged(DataSettings, Tag.LOADER)
    }
    told |= {
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "adopted": ratio.low is not None and ratio.low > 1.0,
    }
    return JointChoice(trials=tried, ratio_to_workers_alone=ratio.value, **told)


def _search(
    sweep: Sweep, alone: DataSettings, trials: int
) -> dict[DataSettings, list[float]]:
    """Try ``trials`` settings.

    Return the ratios to cached batches of those that ran.
    """
    from optuna.trial import TrialState

    pinning = (
        sweep.training.config.device == "cuda"
        and sweep.training.request.replayed_step_s is None
    )
    space = loader_space(sweep.max_workers, pinning=pinning)
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=pinning)
    number, values = len(sweep.rounds), dict[DataSettings, list[float]]()
    for _ in range(trials):
        if sweep.time_is_over:
            break
        trial = study.ask(fixed_distributions=space)
        data = alone.model_copy(update=trial.params)
        limits = replace(sweep.training.limits, prefetch_factor=data.prefetch_factor)
        try:
            if (
                refusal := limits.refusal(data.num_workers, sweep.worker_bytes)
            ) is not None:
                raise WorkersDied(refusal)
            cached, rate = _rates(sweep, number, (alone, True), (data, False))
        except WorkersDied:
            study.tell(trial, state=TrialState.FAIL)
            continue
        study.tell(trial, rate / cached)
        values.setdefault(data, []).append(rate / cached)
        number += 1
    return values


def _verify(
    sweep: Sweep, number: int, candidate: DataSettings, alone: DataSettings
) -> Interval:
    """Interleave windows of both until they differ or the rounds or time are used up.

    Return the ratio.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        tried, reference = _rates(
            sweep, number + len(pairs), (candidate, False), (alone, False)
        )
        pairs.append((tried, reference))
        ratio = paired_ratio(pairs)
        differs = (
            ratio.low is not None
            and ratio.high is not None
            and not ratio.low <= 1.0 <= ratio.high
        )
        if (
            len(pairs) >= VERIFYING_ROUNDS
            or (len(pairs) >= 2 * FIRST_ROUNDS and differs)
            or sweep.time_is_over
        ):
            return ratio


def _rates(sweep: Sweep, number: int, *asked: tuple[DataSettings, bool]) -> list[float]:
    """Return tokens/s including padding of consecutive windows: their settings, and True for cached batches."""
    form = (
        "num_workers={0.num_workers}, prefetch_factor={0.prefetch_factor},"
        " pin_memory={0.pin_memory}".format
    )
    names = ["cached batches" if cached else form(data) for data, cached in asked]
    configs = [
        (sweep.training.config.model_copy(update={"data": data}), cached)
        for data, cached in asked
    ]
    trials = [
        training_trial(sweep.training, one, number, names, cached=cached)
        for one, cached in configs
    ]
    found = sweep.read_windows(number, list(zip(trials, names, strict=True)))
    return [one.padded_tokens_per_s for one in found]


def loader_space(max_workers: int, *, pinning: bool) -> "dict[str, BaseDistribution]":
    """Return the joint space of loader settings.

    Pinned memory is only useful with a GPU.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    workers, ahead = (
        IntDistribution(0, max_workers),
        CategoricalDistribution(PREFETCH_CHOICES),
    )
    space: dict[str, BaseDistribution] = {
        "num_workers": workers,
        "prefetch_factor": ahead,
    }
    return space | (
        {"pin_memory": CategoricalDistribution((True, False))} if pinning else {}
    )


def study_of(
    windows: Iterable[FinishedTrial], max_workers: int, *, pinning: bool
) -> "optuna.Study":
    """Return a study that maximises tokens/s including padding relative to cached batches in the same round.

    Windows with settings outside the space, or without cached batches in their round,
    are ignored.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
    )
    space = loader_space(max_workers, pinning=pinning)
    measured = [
        (
            TrainingRequest.of(one.trial.measured),
            TrainingFigures.of(one.outcome).padded_tokens_per_s,
        )
        for one in windows
        if one.trial.job == "training" and isinstance(one.outcome, Measured)
    ]
    cached_rates = {request.round: rate for request, rate in measured if request.cached}
    for request, rate in measured:
        params = {name: getattr(request.config.data, name) for name in space}
        inside = (
            params["num_workers"] <= max_workers
            and params["prefetch_factor"] in PREFETCH_CHOICES
        )
        if inside and not request.cached and request.round in cached_rates:
            value = rate / cached_rates[request.round]
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=space, value=value
                )
            )
    return study
