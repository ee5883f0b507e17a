"""Explanation of a setting by an exploration. Pure."""

from collections.abc import Sequence

from autotune.advice.values import EvidenceFigure, figure
from autotune.profiles.decide.explain.batch_sizes import explain_micro_batch, is_split
from autotune.profiles.decide.explain.explanation import Explanation
from autotune.profiles.values import Profile
from autotune.search.values import KNOBS, Configuration, ExploredRow


def explain_explored(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by an exploration.

    Returns:
        None if that tried one value only, or a later command decided it.
    """
    explore = profile.evidence.explore
    probe = profile.evidence.probe
    if explore is None or key not in KNOBS:
        return None
    # The starting configuration has the probe's choice, and network tuning runs later.
    if key == "micro_batch_size" and (not explore.adopted or is_split(profile)):
        return None
    rows_by_value: dict[object, list[ExploredRow]] = {}
    for row in explore.rows:
        rows_by_value.setdefault(getattr(row.settings, key), []).append(row)
    if len(rows_by_value) < 2:
        return None
    figures: list[EvidenceFigure] = []
    if explore.candidate != explore.starting:
        name = f"{explore.candidate.name}, relative to the starting configuration"
        figures.append(figure(name, explore.ratio, "ratio", "evidence.explore"))
    if key == "micro_batch_size" and probe is not None:
        figures += explain_micro_batch(profile, probe).evidence
    chosen = getattr(explore.chosen, key)
    because = f"joint search of the step's settings: {explore.choice}"
    if chosen != value:
        because = f"{chosen} was chosen; {because}"
    return Explanation(
        origin="measured" if chosen == value else "changed",
        evidence=tuple(figures),
        because=because,
        rejected=tuple(
            _best_with(other, rows, explore.starting)
            for other, rows in rows_by_value.items()
            if other != chosen
        ),
    )


def _best_with(
    value: object, rows: Sequence[ExploredRow], starting: Configuration
) -> str:
    """Return the best configuration with a value of a setting, in words.

    Args:
        value: Another value of the setting than the chosen one.
        rows: Configurations with this value.
        starting: Configuration that all were compared with.
    """
    shown = str(value).lower() if isinstance(value, bool) else value
    all_ratios = {row.settings.name: row.ratio_to_starting for row in rows}
    if any(row.settings == starting for row in rows):
        # The others were compared with it, so it has no ratio of its own.
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
