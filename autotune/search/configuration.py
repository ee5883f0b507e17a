"""A configuration: a choice of values for the settings that are searched together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.subjects.subject import Argument


@dataclass(frozen=True, slots=True)
class Configuration(Mapping[str, Argument]):
    """A frozen, hashable choice of settings, which has the size as well.

    It is a mapping, so that it can be given to ``Subject.step`` as it is.
    """

    items_in_order: tuple[tuple[str, Argument], ...]
    """Setting and value, in the order of the subject's settings."""

    @classmethod
    def of(cls, choice: Mapping[str, Argument]) -> "Configuration":
        """Return the configuration with the settings of ``choice``."""
        return cls(tuple(choice.items()))

    def __getitem__(self, name: str) -> Argument:
        for known_name, value in self.items_in_order:
            if known_name == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items_in_order)

    def __len__(self) -> int:
        return len(self.items_in_order)

    def but(self, changes: Mapping[str, Argument]) -> "Configuration":
        """Return the configuration with other values of some settings."""
        return Configuration(
            tuple(
                (name, changes.get(name, value)) for name, value in self.items_in_order
            )
        )
