"""A posterior's proposals as an Optuna sampler, and what can no longer win as an Optuna pruner."""

from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.core.knobs import KNOBS, Knobs

Propose = Callable[[Sequence[Knobs]], Knobs | None]


def distributions(cells: Sequence[Knobs]) -> dict[str, BaseDistribution]:
    """The space as Optuna knows it; not every combination of values is a cell."""
    return {name: CategoricalDistribution(sorted({getattr(cell, name) for cell in cells}, key=str)) for name in KNOBS}


class PosteriorSampler(optuna.samplers.BaseSampler):
    """Asks for the cell that is expected to win most.

    Args:
        space: What ``distributions`` gives.
        propose: From the cells that are being tried, the next one; None where nothing is left.
        seed: Of the random choice that is asked for then, and that nobody tries.
    """

    def __init__(self, space: dict[str, BaseDistribution], propose: Propose, seed: int) -> None:
        self._space, self._propose = space, propose
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All of it: values are chosen together."""
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The values of the proposed cell."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        pending = [Knobs(**other.params) for other in running if set(KNOBS) <= set(other.params)]
        cell = self._propose(pending)
        return {} if cell is None else cell.settings()

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:  # noqa: ANN401  as Optuna declares it
        """Any value, where nothing is left to propose."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)


class VisiblePruner(optuna.pruners.BasePruner):
    """Prunes what a first look shows to be hopeless.

    Args:
        hopeless: Whether so low a value can no longer win.
    """

    def __init__(self, hopeless: Callable[[float], bool]) -> None:
        self._hopeless = hopeless

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether to stop here."""
        step = trial.last_step
        return step is not None and self._hopeless(trial.intermediate_values[step])
