"""Explanation of a setting by an exploration. Pure."""

from collections.abc import Iterator, Sequence

from autotune.advice.values import EvidenceFigure, figure
from autotune.profiles.decide.explain.batch_sizes import (
    explain_micro_batch,
    is_split_by_network,
)
from autotune.profiles.decide.explain.explanation import Explanation, Origin
from autotune.profiles.values import Profile
from autotune.search.values import KNOBS, Configuration, ExploredRow, ExploreEvidence


def explain_explored(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by an exploration.

    Returns:
        None if the exploration tried only one value, or another command decided it.
    """
    explore = profile.evidence.explore
    if explore is None or key not in KNOBS:
        return None
    if key == "micro_batch_size":
        # The starting configuration has the probe's choice.
        is_probes_choice = not explore.adopted
        # Network tuning runs later.
        if is_probes_choice or is_split_by_network(profile):
            return None
    rows_by_value: dict[object, list[ExploredRow]] = {}
    for row in explore.rows:
        rows_by_value.setdefault(getattr(row.settings, key), []).append(row)
    if len(rows_by_value) < 2:
        return None
    chosen = getattr(explore.chosen, key)
    origin: Origin = "measured"
    because = f"joint search of the step's settings: {explore.choice}"
    if chosen != value:
        origin = "changed"
        because = f"{chosen} was chosen; {because}"
    return Explanation(
        origin=origin,
        evidence=tuple(_figures(profile, explore, key)),
        because=because,
        rejected=tuple(
            _best_with(other, rows, explore.starting)
            for other, rows in rows_by_value.items()
            if other != chosen
        ),
    )


def _figures(
    profile: Profile, explore: ExploreEvidence, key: str
) -> Iterator[EvidenceFigure]:
    """Yield the gain of the exploration, and the probe's figures on its own setting."""
    if explore.candidate != explore.starting:
        name = f"{explore.candidate.name}, relative to the starting configuration"
        yield figure(name, explore.ratio, "ratio", "evidence.explore")
    probe = profile.evidence.probe
    if key == "micro_batch_size" and probe is not None:
        yield from explain_micro_batch(profile, probe).evidence


def _best_with(
    value: object, rows: Sequence[ExploredRow], starting: Configuration
) -> str:
    """Return the best configuration with a value of a setting, in words.

    Args:
        value: Another value of the setting than the chosen one.
        rows: Configurations with this value.
        starting: Configuration that all were compared with.
    """
    # As in TOML: true, false.
    shown = str(value).lower() if isinstance(value, bool) else value
    all_ratios = {row.settings.name: row.ratio_to_starting for row in rows}
    if any(row.settings == starting for row in rows):
        # The others were compared with it, so it has no ratio.
        all_ratios[starting.name] = 1.0
    ratios = {name: ratio for name, ratio in all_ratios.items() if ratio is not None}
    if not ratios:
        outcomes = dict.fromkeys(row.outcome for row in rows)
        return f"{shown}: {', '.join(outcomes)}"
    best = max(ratios, key=lambda name: ratios[name])
    if best == starting.name:
        return (
            f"{shown}: no configuration with it was faster than the starting one, which"
            " has it"
        )
    return (
        f"{shown}: at best {ratios[best]:.3f} times the starting configuration, with"
        f" {best}"
    )
