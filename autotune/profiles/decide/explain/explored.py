"""Explanation of a setting by an exploration. Pure."""

from collections.abc import Iterator, Sequence

from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.explore import (
    ExploredConfiguration,
    ExploredRow,
    ExploreEvidence,
)
from autotune.evidence.profile import Profile
from autotune.profiles.decide.explain.batch_sizes import (
    explain_micro_batch,
    is_split_by_network,
)
from autotune.profiles.decide.explain.explanation import Explanation, Origin


def explain_explored(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by an exploration.

    Args:
        profile: Profile with the setting.
        key: Dotted name of the setting.
        value: Value of the setting in the profile.

    Returns:
        None if the exploration tried fewer than two values of the setting, or another
        command decided it.
    """
    explore = profile.evidence.explore
    if explore is None or key not in explore.starting.settings:
        return None
    if key == "micro_batch_size" and not _has_decided_size(profile, explore):
        return None
    rows_by_value: dict[object, list[ExploredRow]] = {}
    for row in explore.rows:
        rows_by_value.setdefault(row.settings[key], []).append(row)
    if len(rows_by_value) < 2:
        return None
    chosen = explore.chosen.settings[key]
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


def _has_decided_size(profile: Profile, explore: ExploreEvidence) -> bool:
    """Return whether an exploration decided the micro-batch size.

    Otherwise it is the probe's, which the starting configuration has, or that of
    network tuning, which runs later.
    """
    return explore.adopted and not is_split_by_network(profile)


def _figures(
    profile: Profile, explore: ExploreEvidence, key: str
) -> Iterator[EvidenceFigure]:
    """Yield the gain of the exploration, and the figures of the probe on the setting.

    The probe has figures of the micro-batch size only.
    """
    if explore.candidate != explore.starting:
        name = f"{explore.candidate.name}, relative to the starting configuration"
        yield figure(name, explore.ratio, "ratio", "evidence.explore")
    probe = profile.evidence.probe
    if key == "micro_batch_size" and probe is not None:
        yield from explain_micro_batch(profile, probe).evidence


def _best_with(
    value: object, rows: Sequence[ExploredRow], starting: ExploredConfiguration
) -> str:
    """Return the best configuration with a value of a setting, in words.

    Args:
        value: Value of the setting that was not chosen.
        rows: Configurations with this value.
        starting: Configuration that all others were compared with.
    """
    # As in TOML: true, false.
    value_text = str(value).lower() if isinstance(value, bool) else str(value)
    ratios: dict[str, float] = {}
    for row in rows:
        ratio = row.ratio_to_starting
        if row.settings == starting.settings:
            # It was not compared with itself.
            ratio = 1.0
        if ratio is not None:
            ratios[row.name] = ratio
    if not ratios:
        outcomes = dict.fromkeys(row.outcome for row in rows)
        return f"{value_text}: {', '.join(outcomes)}"
    best = max(ratios, key=lambda name: ratios[name])
    if best == starting.name:
        return (
            f"{value_text}: no configuration with it was faster than the starting one,"
            " which has it"
        )
    return (
        f"{value_text}: at best {ratios[best]:.3f} times the starting configuration,"
        f" with {best}"
    )
