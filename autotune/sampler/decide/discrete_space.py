"""A discrete space of settings, and how alike its configurations are. Pure.

A configuration is encoded as the index of its value in each setting's values. Arrays of
codes have the shape (configurations, settings).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.intp]

LENGTH_SCALE_DOUBLINGS = 1.5
"""Length scale of numeric settings, in doublings: the effects of two values this far
apart have a correlation of 61 %."""


@dataclass(frozen=True, slots=True)
class SettingCorrelation:
    """A setting with several values, and the prior correlations of their effects."""

    name: str
    """Name of the setting."""
    index_of_value: Mapping[Any, int]
    """Code of each value."""
    correlations: Float64
    """Correlations of the values' effects, shape (values, values)."""


@dataclass(frozen=True, slots=True)
class DiscreteSpace:
    """The settings that vary in a set of configurations."""

    settings: tuple[SettingCorrelation, ...]
    """Settings with at least two values. Others make no difference."""

    def encode(self, configurations: Sequence[Mapping[str, Any]]) -> Codes:
        """Return the codes of configurations.

        Raises:
            KeyError: If a configuration has no value, or an unknown one, for a setting.
        """
        codes = np.empty((len(configurations), len(self.settings)), dtype=np.intp)
        for column, setting in enumerate(self.settings):
            codes[:, column] = [
                setting.index_of_value[configuration[setting.name]]
                for configuration in configurations
            ]
        return codes

    def similarities(self, rows: Codes, columns: Codes) -> tuple[Float64, Float64]:
        """Return how alike the settings of configurations are.

        Args:
            rows: Codes of n configurations.
            columns: Codes of m configurations.

        Returns:
            The prior correlations of the effects of single settings, summed over the
            settings; and those of pairs of settings, summed over the pairs. Both have
            the shape (n, m).
        """
        total = np.zeros((len(rows), len(columns)))
        total_of_squares = np.zeros_like(total)
        for number, setting in enumerate(self.settings):
            correlation = setting.correlations[
                rows[:, number, None], columns[None, :, number]
            ]
            total += correlation
            total_of_squares += correlation**2
        # A pair's correlation is the product of its settings' correlations. All
        # products are in the square of the sum, each pair twice.
        return total, (total**2 - total_of_squares) / 2


def space_of(values: Mapping[str, Iterable[Any]]) -> DiscreteSpace:
    """Return the space of settings with these values.

    Values that are positive numbers, or numbers from 0, correlate by their distance on
    a log scale. Others are either equal or different.
    """
    settings = []
    for name, values_of_setting in values.items():
        distinct = tuple(dict.fromkeys(values_of_setting))
        if len(distinct) < 2:
            continue
        settings.append(
            SettingCorrelation(
                name=name,
                index_of_value={value: code for code, value in enumerate(distinct)},
                correlations=_correlations(distinct),
            )
        )
    return DiscreteSpace(settings=tuple(settings))


def values_in(configurations: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values that each setting has in configurations, in their order."""
    values: dict[str, dict[Any, None]] = {}
    for configuration in configurations:
        for name, value in configuration.items():
            values.setdefault(name, {})[value] = None
    return {name: list(distinct) for name, distinct in values.items()}


def _correlations(values: Sequence[Any]) -> Float64:
    """Return the prior correlations of the effects of a setting's values."""
    doublings = _doublings(values)
    if doublings is None:
        return np.eye(len(values))
    distance = doublings[:, None] - doublings[None, :]
    return np.asarray(np.exp(-(distance**2) / (2 * LENGTH_SCALE_DOUBLINGS**2)))


def _doublings(values: Sequence[Any]) -> Float64 | None:
    """Return numbers on a log scale to base 2; None if they are no numbers from 0."""
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values
    )
    if not are_numbers or min(values) < 0 or not all(map(math.isfinite, values)):
        return None
    # A count from 0, such as of workers: the step from 0 to 1 counts as a doubling.
    offset = 1 if min(values) == 0 else 0
    return np.log2(np.array(values, dtype=np.float64) + offset)
