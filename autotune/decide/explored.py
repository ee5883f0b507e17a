"""Why a setting that was explored together with others is what it is. Pure."""

from typing import NamedTuple

from autotune.core.advice import EvidenceFigure, figure
from autotune.core.exploration import KNOBS, Configuration, ExploredRow, ExploreEvidence

SOURCE = "evidence.explore"


class KnobChoice(NamedTuple):
    """What an exploration says of one setting."""

    chosen: object
    """Its value after the exploration."""
    because: str
    figures: tuple[EvidenceFigure, ...]
    rejected: tuple[str, ...]


def explored_setting(found: ExploreEvidence, key: str) -> KnobChoice | None:
    """What is to be said of a setting; None of one that had no other value to try."""
    if key not in KNOBS or len({getattr(row.settings, key) for row in found.rows}) < 2:
        return None
    because = f"explored together with other settings of the step: {found.choice}"
    return KnobChoice(getattr(found.chosen, key), because, _proof(found), _others(found, key))


def _proof(found: ExploreEvidence) -> tuple[EvidenceFigure, ...]:
    """What was held against the unexplored settings."""
    if found.candidate == found.unexplored:
        return ()
    return (figure(f"{found.candidate.name}, to the unexplored", found.ratio, "ratio", SOURCE),)


def _others(found: ExploreEvidence, key: str) -> tuple[str, ...]:
    """The other values, each with the best that was seen of it."""
    of_value: dict[object, list[ExploredRow]] = {}
    for row in found.rows:
        of_value.setdefault(getattr(row.settings, key), []).append(row)
    chosen = getattr(found.chosen, key)
    return tuple(_other(value, rows, found.unexplored) for value, rows in of_value.items() if value != chosen)


def _other(value: object, rows: list[ExploredRow], unexplored: Configuration) -> str:
    said = str(value).lower() if isinstance(value, bool) else value
    ratios = {
        row.settings.name: 1.0 if row.settings == unexplored else row.ratio_to_unexplored
        for row in rows
        if row.settings == unexplored or row.ratio_to_unexplored is not None
    }
    if not ratios:
        return f"{said}: {', '.join(dict.fromkeys(row.outcome for row in rows))}"
    name = max(ratios, key=lambda one: ratios[one] or 0.0)
    if name == unexplored.name:
        return f"{said}: nothing with it was faster than the unexplored settings, which have it"
    return f"{said}: at best {ratios[name]:.3f} times the unexplored settings, with {name}"
