"""An Optuna sampler for small discrete spaces, in which few trials must suffice.

The model is that of ``decide.effects_model``; the next trial has the largest expected
improvement per square root of its seconds. ``python -m benchmarks.tune`` compares it
with Optuna's TPE.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.sampler.decide.discrete_space import space_of
from autotune.sampler.decide.effects_model import (
    EFFECT_SIGMAS,
    Evaluation,
    Observation,
    Posterior,
    posterior,
)
from autotune.sampler.decide.improvement import (
    augmented_expected_improvement,
    expected_improvement,
)

Params = Mapping[str, Any]
"""Values of parameters, by name."""
MAX_VALUES = 16
"""Limit of the values of a number that are candidates: of a wider range, neighbours
perform alike."""
MAX_CANDIDATES = 20_000
"""Limit of the candidates of a proposal; of a larger space they are a random part."""
REFERENCE_WINDOWS = 8
"""Number of windows that the reference counts as: its ratio is 1 by definition."""


def value_of_trial(trial: FrozenTrial) -> Iterator[Evaluation]:
    """Yield a completed trial's value, or the last one that a pruned trial reported."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        yield Evaluation(value=trial.value)
    elif trial.state == TrialState.PRUNED and trial.intermediate_values:
        last_step = max(trial.intermediate_values)
        yield Evaluation(value=trial.intermediate_values[last_step], short=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """Trials of a study, as the model takes them."""

    params: list[dict[str, Any]]
    """Parameters of each evaluation."""
    log_ratios: list[float]
    short: list[bool]
    pending: list[dict[str, Any]]
    """Parameters of running trials, which are assumed to perform as predicted."""
    failed: list[dict[str, Any]]
    """Parameters of trials that failed, which are not proposed again."""


class PairwiseEffectsSampler(BaseSampler):
    """Sampler by a Gaussian process of settings' effects and effects of their pairs.

    It suits objectives in which settings act independently or in pairs, such as
    throughput by precision, layout and batch size, and in which each trial is
    expensive::

        import optuna
        from autotune.sampler.pairwise_effects import PairwiseEffectsSampler

        def tokens_per_s(trial: optuna.Trial) -> float:
            precision = trial.suggest_categorical("precision", ["fp32", "bf16"])
            compile = trial.suggest_categorical("compile", [False, True])
            batch_size = trial.suggest_int("batch_size", 1, 64, log=True)
            return measure(precision, compile, batch_size)

        sampler = PairwiseEffectsSampler(
            is_possible=lambda params: params["batch_size"] <= 32 or params["compile"],
            seconds_of=lambda params: 90.0 if params["compile"] else 5.0,
            seed=0,
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.optimize(tokens_per_s, n_trials=20)

    It reads the values of completed trials, and the last intermediate values of pruned
    ones, which count as noisier. Values are taken as logarithms if all are positive.
    Parameters of failed trials are not proposed again, and neither are those of running
    trials, which are assumed to perform as predicted. Parameters that it does not
    model, such as floats without a step, are sampled at random. The same study and seed
    give the same proposal.

    Args:
        space: Distributions to model; None models those that all trials share, as
            Optuna's own samplers do.
        candidates: Parameters to choose from; None for all combinations of the space.
        is_possible: Returns False for parameters that must not be tried. It is called
            for the best candidates only, so it may be slow.
        seconds_of: Expected seconds of a trial; infinite if there is no time for it.
            None if all take equally long.
        predicted_ratio_of: Predicted ratio of a trial's value to the reference's, or to
            that of an average trial; None if it is not known. Predictions guide the
            first trials, and are given up if trials contradict them. They may become
            known while ``is_possible`` is called.
        reference: Parameters whose value is 1: set it if values are ratios to them.
        evaluations_of: Returns what a completed or pruned trial measured.
        discount_repeats: True to prefer parameters that were tried less often, so that
            a noisy objective does not repeat the best ones.
        seed: Seed of random sampling.
    """

    def __init__(
        self,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        candidates: Sequence[Params] | None = None,
        is_possible: Callable[[Params], bool] = lambda params: True,
        seconds_of: Callable[[Params], float] | None = None,
        predicted_ratio_of: Callable[[Params], float | None] | None = None,
        reference: Params | None = None,
        evaluations_of: Callable[[FrozenTrial], Iterable[Evaluation]] = value_of_trial,
        discount_repeats: bool = True,
        seed: int | None = None,
    ) -> None:
        self._space = None if space is None else _modelled(space)
        self._candidates = candidates
        self._is_possible = is_possible
        self._seconds_of = seconds_of
        self._predicted_ratio_of = predicted_ratio_of
        self._reference = reference
        self._evaluations_of = evaluations_of
        self._discount_repeats = discount_repeats
        self._seed = seed or 0
        self._random = RandomSampler(seed=seed)
        self._shared_space = IntersectionSearchSpace()

    def reseed_rng(self) -> None:
        """Give another seed to random sampling, such as for another worker."""
        self._random.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the distributions that the model proposes together."""
        if self._space is not None:
            return self._space
        return _modelled(self._shared_space.calculate(study))

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the parameters with the largest expected improvement for their time.

        Raises:
            ValueError: If the study has several objectives, or if no candidate is
                possible.
        """
        self._raise_error_if_multi_objective(study)
        fixed_params = trial.system_attrs.get("fixed_params", {})
        if not search_space or search_space.keys() <= fixed_params.keys():
            return {}
        params = self.propose(study, search_space, excluding=trial.number)
        if params is None:
            raise ValueError("no candidate is possible")
        return {name: params[name] for name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a random value of a parameter that is not modelled."""
        return self._random.sample_independent(
            study, trial, param_name, param_distribution
        )

    def propose(
        self,
        study: Study,
        search_space: Mapping[str, BaseDistribution] | None = None,
        *,
        excluding: int | None = None,
    ) -> Params | None:
        """Return the parameters that the next trial should have.

        Args:
            study: Study with one objective.
            search_space: Distributions to propose; None for those of the sampler.
            excluding: Number of the trial that is being sampled.

        Returns:
            The parameters; None if no candidate is possible.
        """
        search_space = search_space or self._space or {}
        observed = self._observe(study, search_space, excluding)
        excluded = {
            _key(params, search_space)
            for params in (*observed.pending, *observed.failed)
        }
        candidates_by_key = {
            _key(candidate, search_space): candidate
            for candidate in self._candidates_of(search_space, study)
        }
        candidates = [
            candidate
            for key, candidate in candidates_by_key.items()
            if key not in excluded
        ]
        # Predictions that become known while candidates are checked change the order.
        impossible: set[int] = set()
        while True:
            predicted = [self._predicted_ratio(candidate) for candidate in candidates]
            for number in self._ranking(
                search_space, observed, candidates, predicted, impossible
            ):
                candidate = candidates[number]
                possible = self._is_possible(candidate)
                if not possible:
                    impossible.add(number)
                if self._predicted_ratio(candidate) != predicted[number]:
                    break
                if possible:
                    return candidate
            else:
                return None

    def _predicted_ratio(self, params: Params) -> float | None:
        if self._predicted_ratio_of is None:
            return None
        return self._predicted_ratio_of(params)

    def _ranking(
        self,
        search_space: Mapping[str, BaseDistribution],
        observed: _Observed,
        candidates: Sequence[Params],
        predicted: Sequence[float | None],
        impossible: set[int],
    ) -> list[int]:
        """Return indices of candidates by expected improvement and time, best first.

        Candidates without time, and impossible ones, are left out.
        """
        seconds = {}
        for number, candidate in enumerate(candidates):
            expected_s = 1.0
            if self._seconds_of is not None:
                expected_s = self._seconds_of(candidate)
            if number not in impossible and math.isfinite(expected_s):
                seconds[number] = expected_s
        if not observed.params:
            return self._generator(len(observed.pending)).sample(
                list(seconds), len(seconds)
            )
        predictions, best = _predict(search_space, observed, candidates, predicted)
        gains = expected_improvement(predictions, best)
        if self._discount_repeats:
            gains = augmented_expected_improvement(predictions, best)
        # The root of the time, after Snoek et al., NeurIPS 2012, section 3.2: compiling
        # takes a minute.
        worth = {
            number: float(gains[number]) / seconds[number] ** 0.5 for number in seconds
        }
        return sorted(worth, key=lambda number: -worth[number])

    def _generator(self, trials: int) -> random.Random:
        """Return another generator for each number of trials, by the seed."""
        return random.Random(f"{self._seed} {trials}")

    def _observe(
        self,
        study: Study,
        search_space: Mapping[str, BaseDistribution],
        excluding: int | None,
    ) -> _Observed:
        """Return the trials of a study, with values on the model's scale."""
        params, evaluations, pending, failed = [], [], [], []
        for trial in study.get_trials(deepcopy=False):
            in_space = {
                name: trial.params[name]
                for name in search_space
                if name in trial.params
            }
            if trial.number == excluding or len(in_space) < len(search_space):
                continue
            if trial.state == TrialState.RUNNING:
                pending.append(in_space)
            elif trial.state == TrialState.FAIL:
                failed.append(in_space)
            elif trial.state.is_finished():
                for evaluation in self._evaluations_of(trial):
                    params.append(in_space)
                    evaluations.append(evaluation)
        log_ratios = _log_ratios(
            [evaluation.value for evaluation in evaluations],
            has_reference=self._reference is not None,
        )
        if study.direction == StudyDirection.MINIMIZE:
            log_ratios = [-log_ratio for log_ratio in log_ratios]
        short = [evaluation.short for evaluation in evaluations]
        if self._reference is not None:
            params += [dict(self._reference)] * REFERENCE_WINDOWS
            log_ratios += [0.0] * REFERENCE_WINDOWS
            short += [False] * REFERENCE_WINDOWS
        return _Observed(
            params=params,
            log_ratios=log_ratios,
            short=short,
            pending=pending,
            failed=failed,
        )

    def _candidates_of(
        self, search_space: Mapping[str, BaseDistribution], study: Study
    ) -> Sequence[Params]:
        """Return the parameters to choose from."""
        if self._candidates is not None:
            return self._candidates
        values = [_values(distribution) for distribution in search_space.values()]
        combinations: Iterable[tuple[Any, ...]] = itertools.product(*values)
        if math.prod(map(len, values)) > MAX_CANDIDATES:
            # Another part for each trial, and the same one for the same study.
            rng = self._generator(len(study.get_trials(deepcopy=False)))
            combinations = {
                tuple(map(rng.choice, values)): None for _ in range(MAX_CANDIDATES)
            }
        return [
            dict(zip(search_space, combination, strict=True))
            for combination in combinations
        ]


def _predict(
    search_space: Mapping[str, BaseDistribution],
    observed: _Observed,
    candidates: Sequence[Params],
    predicted: Sequence[float | None],
) -> tuple[Posterior, float]:
    """Return the prediction of all candidates, and the best mean that was observed.

    Configurations that were observed follow the candidates. Those that run are taken to
    perform as the other trials predict.
    """
    configurations: dict[tuple[Any, ...], int] = {}
    for params in (*candidates, *observed.params, *observed.pending):
        configurations.setdefault(_key(params, search_space), len(configurations))
    values = {
        name: [key[column] for key in configurations]
        for column, name in enumerate(search_space)
    }
    space = space_of(values)
    codes = space.encode(
        [dict(zip(search_space, key, strict=True)) for key in configurations]
    )
    observed_numbers = [
        configurations[_key(params, search_space)] for params in observed.params
    ]
    observations = [
        Observation(configuration=number, log_ratio=log_ratio, short=short)
        for number, log_ratio, short in zip(
            observed_numbers, observed.log_ratios, observed.short, strict=True
        )
    ]
    log_predicted = {
        number: math.log(ratio)
        for number, ratio in enumerate(predicted)
        if ratio is not None
    }
    predictions = posterior(space, codes, observations, log_predicted)
    pending_numbers = [
        configurations[_key(params, search_space)] for params in observed.pending
    ]
    if pending_numbers:
        observations += [
            Observation(configuration=number, log_ratio=float(predictions.mean[number]))
            for number in pending_numbers
        ]
        predictions = posterior(space, codes, observations, log_predicted)
    best = max(float(predictions.mean[number]) for number in observed_numbers)
    return predictions, best


def _log_ratios(values: Sequence[float], *, has_reference: bool) -> list[float]:
    """Return values on the model's scale, on which 0.3 is a usual effect.

    They are logarithms if all are positive, relative to the mean unless they are ratios
    already. Otherwise their deviations from the mean are scaled.
    """
    if not values:
        return []
    if min(values) > 0:
        logs = [math.log(value) for value in values]
        centre = 0.0 if has_reference else statistics.fmean(logs)
        return [log - centre for log in logs]
    mean = statistics.fmean(values)
    scale = (statistics.pstdev(values) or 1.0) / EFFECT_SIGMAS[1]
    return [(value - mean) / scale for value in values]


def _modelled(space: Mapping[str, BaseDistribution]) -> dict[str, BaseDistribution]:
    """Return the distributions that have a few values each."""
    return {
        name: distribution
        for name, distribution in space.items()
        if not distribution.single() and _is_discrete(distribution)
    }


def _is_discrete(distribution: BaseDistribution) -> bool:
    if isinstance(distribution, FloatDistribution):
        return distribution.step is not None
    return isinstance(distribution, CategoricalDistribution | IntDistribution)


def _values(distribution: BaseDistribution) -> list[Any]:
    """Return the values of a distribution, at most ``MAX_VALUES`` if it is a number."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high = distribution.low, distribution.high
    if isinstance(distribution, IntDistribution) and distribution.log:
        values = list(range(distribution.low, distribution.high + 1))
        return values if len(values) <= MAX_VALUES else _spread(values, by_factor=True)
    step = distribution.step or 1
    count = round((high - low) / step) + 1
    numbers = [low + number * step for number in range(count)]
    return numbers if count <= MAX_VALUES else _spread(numbers, by_factor=False)


def _spread(values: Sequence[Any], *, by_factor: bool) -> list[Any]:
    """Return ``MAX_VALUES`` of many values, at equal distances or at equal factors."""
    last = len(values) - 1
    chosen: dict[Any, None] = {}
    for number in range(MAX_VALUES):
        share = number / (MAX_VALUES - 1)
        index = round(share * last)
        if by_factor:
            wanted = values[0] * (values[-1] / values[0]) ** share
            index = round(wanted - values[0])
        chosen[values[index]] = None
    return list(chosen)


def _key(params: Params, search_space: Iterable[str]) -> tuple[Any, ...]:
    """Return the values of parameters, in the order of a space."""
    return tuple(params[name] for name in search_space)
