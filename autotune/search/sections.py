"""Report sections on the joint search of a step's settings."""

from autotune.base.document import Block, Missing, bulleted, table_of
from autotune.base.units import format_count
from autotune.profiles.exploration_text import exploration_lines
from autotune.profiles.reported_profile import ReportedProfile


def exploration_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the search's result and trials, the fastest first, failed ones last."""
    found = one.profile.evidence.explore
    if found is None:
        command = f"autotune tune --model {one.name} --data DIR --explore"
        return (
            Missing(
                subject="Joint search of the step's settings",
                state="not requested",
                commands=(command,),
            ),
        )
    predicted = (
        "predicted ratio",
        "r",
        lambda row: None if (one := row.predicted_ratio) is None else f"{one:.3f}",
    )
    table = table_of(
        "Configurations that were tried; tokens/s exclude padding, ratios are to the"
        " starting one in the same round",
        sorted(
            found.rows,
            key=lambda row: (
                -(row.ratio_to_starting or (row.settings == found.starting))
            ),
        ),
        ("configuration", "l", lambda row: row.settings.name),
        ("windows", "r", lambda row: str(row.windows)),
        ("tokens/s (median)", "r", lambda row: format_count(row.tokens_per_s)),
        (
            "ratio",
            "r",
            lambda row: (
                None if (one := row.ratio_to_starting) is None else f"{one:.3f}"
            ),
        ),
        *([predicted] if any(row.predicted_ratio for row in found.rows) else []),
        (
            "outcome",
            "l",
            lambda row: "completed" if row.outcome == "ran" else row.outcome,
        ),
        long=True,
    )
    return (bulleted(exploration_lines(found)), table)
