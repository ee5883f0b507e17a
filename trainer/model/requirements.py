"""Requirements of optional settings. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.errors import BadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition under which an optional setting can be used."""

    is_fulfilled: bool
    reason: str
    """Predicate that tells why the setting fails otherwise, such as ``requires a
    GPU``; messages put it after the key of the setting."""
    setting: str | None = None
    """Setting in ``train`` that fulfils the condition, as ``key=value``, if any."""


def require(
    key: str,
    conditions: Iterable[Condition],
    *,
    off: str,
    library: str | None = None,
    extra: str = "",
) -> None:
    """Check that a setting can be used.

    Args:
        key: Key of the setting in ``train``.
        conditions: Conditions that must be fulfilled.
        off: Value that turns the setting off.
        library: Package that the setting requires, if any.
        extra: Extra of this project that installs the package.

    Raises:
        BadConfig: If a condition is not fulfilled, or the package is not installed.
    """
    for condition in conditions:
        if not condition.is_fulfilled:
            raise BadConfig(
                f"train.{key} {condition.reason}",
                next_step=_next_step(condition, f"{key}={off}"),
            )
    if library is not None and find_spec(library) is None:
        raise BadConfig(
            f"train.{key} requires {library}",
            next_step=f"Install it: pip install '.[{extra}]'",
        )


def _next_step(condition: Condition, setting_off: str) -> str:
    if condition.setting is None:
        return f"Use --set train.{setting_off}"
    return f"Use --set train.{condition.setting} or --set train.{setting_off}"
