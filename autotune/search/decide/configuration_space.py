"""All configurations of a subject that a search may try. Pure."""

import itertools
from collections.abc import Iterable, Mapping

from autotune.search.configuration import Configuration
from autotune.subjects.searched_settings import SearchedSettings
from autotune.subjects.subject import Argument


def configuration_space(
    settings: SearchedSettings, starting: Mapping[str, Argument], largest_size: int
) -> tuple[Configuration, ...]:
    """Return all possible configurations, the starting one first.

    Args:
        settings: Settings that are searched.
        starting: Present choice, with its size.
        largest_size: Limit of the sizes to try.
    """
    first = at_trained_size(settings, Configuration.of(starting))
    names = [setting.name for setting in settings.settings]
    values = [setting.values for setting in settings.settings]
    configurations = [first]
    for combination in itertools.product(*values):
        kind = without_size(
            settings, first.but(dict(zip(names, combination, strict=True)))
        )
        if settings.is_possible(kind):
            configurations += [
                with_size(settings, kind, size)
                for size in settings.sizes(kind, largest_size)
            ]
    return tuple(dict.fromkeys(configurations))


def at_trained_size(
    settings: SearchedSettings, configuration: Configuration
) -> Configuration:
    """Return the configuration with the size that training has."""
    return with_size(settings, configuration, settings.trained_size(configuration))


def with_size(
    settings: SearchedSettings, configuration: Configuration, size: int
) -> Configuration:
    """Return the configuration at another size."""
    return configuration.but({settings.size.name: size})


def without_size(
    settings: SearchedSettings, configuration: Configuration
) -> Configuration:
    """Return the kind of a configuration: its settings at size 1.

    It is equal for all sizes of the same settings.
    """
    return with_size(settings, configuration, 1)


def fewest_changes(
    settings: SearchedSettings, base: Configuration, target: Configuration
) -> Configuration:
    """Return the possible configuration that is closest to ``base``.

    Args:
        settings: Settings that are searched.
        base: Configuration that the subject may reject.
        target: Possible configuration, from which values are taken if necessary.
    """
    names = [
        setting.name
        for setting in settings.settings
        if base[setting.name] != target[setting.name]
    ]
    for changed_names in _subsets(names):
        changed = base.but({name: target[name] for name in changed_names})
        if settings.is_possible(changed):
            return changed
    return target


def _subsets(names: list[str]) -> Iterable[tuple[str, ...]]:
    """Return all subsets, the smallest first."""
    return itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(len(names) + 1)
    )
