"""Report sections on the joint search of a step's settings."""

from autotune.base.document import Block, Missing, bulleted, table_of
from autotune.base.units import format_count
from autotune.evidence.explore import ExploredRow, ExploreEvidence
from autotune.profiles.decide.follow_up import exploring_command
from autotune.profiles.exploration_text import exploration_lines
from autotune.profiles.reported_profile import ReportedProfile


def exploration_section(profile: ReportedProfile) -> tuple[Block, ...]:
    """Return the search's result and trials, the fastest first, failed ones last."""
    explore = profile.profile.evidence.explore
    if explore is None:
        command = exploring_command(profile.profile)
        return (
            Missing(
                subject="Joint search of the step's settings",
                state="not requested",
                commands=(command,),
            ),
        )
    columns = [
        ("configuration", "l", lambda row: row.name),
        ("windows", "r", lambda row: str(row.windows)),
        (
            f"{profile.profile.subject.unit}/s (median)",
            "r",
            lambda row: format_count(row.tokens_per_s),
        ),
        ("ratio", "r", lambda row: _ratio(row.ratio_to_starting)),
    ]
    if any(row.predicted_ratio for row in explore.rows):
        columns.append(
            ("predicted ratio", "r", lambda row: _ratio(row.predicted_ratio))
        )
    columns.append(("outcome", "l", _outcome))
    table = table_of(
        "Configurations that were tried; rates exclude padding, ratios are to the"
        " starting one in the same round",
        _fastest_first(explore),
        *columns,
        long=True,
    )
    return (bulleted(exploration_lines(explore)), table)


def _fastest_first(explore: ExploreEvidence) -> list[ExploredRow]:
    """Return the rows by their ratio; that of the starting configuration is 1."""

    def ratio(row: ExploredRow) -> float:
        if row.settings == explore.starting.settings:
            return 1.0
        return row.ratio_to_starting or 0.0

    return sorted(explore.rows, key=ratio, reverse=True)


def _ratio(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.3f}"


def _outcome(row: ExploredRow) -> str:
    return "completed" if row.outcome == "ran" else row.outcome
