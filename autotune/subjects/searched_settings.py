"""The interface of settings that are searched together, and its plain implementation.

A subject's ``settings()`` are enough for a search: ``PlainSettings`` takes them as
independent of each other. A subject that knows more, such as which values exclude each
other, implements ``SearchedSettings`` itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.subjects.subject import Argument, Setting, Size

Choice = Mapping[str, Argument]
"""Values of settings, by name; most choices have the size as well."""


class SearchedSettings(Protocol):
    """Settings of a step that are searched together, and what their values mean."""

    @property
    def settings(self) -> Sequence[Setting]:
        """The settings without the size, the present value of each first."""

    @property
    def size(self) -> Size:
        """The size, which is searched with the settings."""

    @property
    def left_out(self) -> Sequence[str]:
        """Settings and values that are not searched, and why."""

    def is_possible(self, choice: Choice) -> bool:
        """Return whether the subject accepts these settings together."""

    def sizes(self, choice: Choice, largest: int) -> Sequence[int]:
        """Return the sizes to try with these settings, ascending, up to a limit."""

    def trained_size(self, choice: Choice) -> int:
        """Return the size that training has if it is configured with this choice.

        It is smaller than the choice's if a global batch is split evenly.
        """

    def useful_share(self, choice: Choice) -> float:
        """Return the share of the computed units that the global batch fills."""

    def non_padding_share(self, choice: Choice) -> float | None:
        """Return the average share of units that are no padding.

        Returns:
            The share; None if each window counts its own units.
        """

    def window_choice(self, choice: Choice) -> Choice:
        """Return the choice with all that it implies for a window.

        The global batch of all choices is the same.
        """

    def loss_check_choice(self, choice: Choice) -> Choice:
        """Return the choice for a short training that compares losses."""

    def starts_slowly(self, choice: Choice) -> bool:
        """Return whether trials take much longer to start, such as to compile."""

    def arithmetic(self, choice: Choice) -> str:
        """Return the settings by which results are rounded, in words.

        Configurations with the same words compute the same.
        """

    def words(self, choice: Choice) -> str:
        """Return a short, unique description for tables and labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """Settings that are independent of each other, without a global batch."""

    settings: tuple[Setting, ...]
    size: Size
    left_out: tuple[str, ...] = ()

    def is_possible(self, choice: Choice) -> bool:
        """Return True: all values go together."""
        return True

    def sizes(self, choice: Choice, largest: int) -> tuple[int, ...]:
        """Return the limit, and the powers of two below it."""
        powers = (2**exponent for exponent in range(largest.bit_length()))
        return tuple(sorted({*powers, largest})) if largest > 0 else ()

    def trained_size(self, choice: Choice) -> int:
        """Return the size of the choice."""
        return int(choice[self.size.name])

    def useful_share(self, choice: Choice) -> float:
        """Return 1: all units count."""
        return 1.0

    def non_padding_share(self, choice: Choice) -> float | None:
        """Return None: each window counts its own units."""
        return None

    def window_choice(self, choice: Choice) -> Choice:
        """Return the choice, which implies nothing else."""
        return choice

    def loss_check_choice(self, choice: Choice) -> Choice:
        """Return the choice, as in a window."""
        return choice

    def starts_slowly(self, choice: Choice) -> bool:
        """Return False: all start in about the same time."""
        return False

    def arithmetic(self, choice: Choice) -> str:
        """Return the values of the settings that change rounding."""
        rounding = [setting for setting in self.settings if setting.changes_rounding]
        return ", ".join(setting_words(setting, choice) for setting in rounding)

    def words(self, choice: Choice) -> str:
        """Return the size and the values of all settings that vary."""
        varying = [setting for setting in self.settings if len(setting.values) > 1]
        size = f"{self.size.name} {choice[self.size.name]}"
        return ", ".join(
            [size, *(setting_words(setting, choice) for setting in varying)]
        )


def setting_words(setting: Setting, choice: Choice) -> str:
    """Return a setting with its value, as TOML has it: ``compile true``."""
    return f"{setting.name} {value_words(choice[setting.name])}"


def value_words(value: Argument) -> str:
    """Return a value as TOML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
