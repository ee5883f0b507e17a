"""Report sections on the settings that were searched jointly."""

from collections.abc import Iterator

from autotune.base.document import Block, Missing, table_of, told
from autotune.base.render import console_text
from autotune.base.units import format_count, format_seconds
from autotune.base.wording import number, of_windows
from autotune.report.values import ReportedProfile
from autotune.search.values import ExploreEvidence


def exploration_text(found: ExploreEvidence) -> str:
    """Return the result of a search and its reasons, for the console."""
    return console_text((told(exploration_lines(found)),))


def exploration_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the search's result and its trials: the fastest first, failed ones last."""
    found = one.profile.evidence.explore
    if found is None:
        command = f"autotune tune --model {one.name} --data DIR --explore"
        what = "Other settings of the step, searched together"
        return (Missing(what=what, state="not asked for", commands=(command,)),)
    table = table_of(
        "Settings that were tried, against the unexplored ones in the same round",
        sorted(found.rows, key=lambda row: -(row.ratio_to_starting or (row.settings == found.starting))),
        ("settings", "l", lambda row: row.settings.name),
        ("windows", "r", lambda row: str(row.windows)),
        ("real tokens/s (median)", "r", lambda row: format_count(row.tokens_per_s)),
        ("of the unexplored", "r", lambda row: None if (one := row.ratio_to_starting) is None else f"{one:.3f}"),
        ("outcome", "l", lambda row: row.outcome),
        long=True,
    )  # fmt: skip
    return (told(exploration_lines(found)), table)


def exploration_lines(found: ExploreEvidence) -> Iterator[str]:
    """Yield one line each: the result, its confidence, and the trials that it rests on."""
    yield f"settings of the step: {found.choice}"
    if found.candidate != found.starting:
        ratio = of_windows(found.ratio, number)
        yield f"{ratio} times the real tokens/s of {found.starting.name}, by {found.candidate.name}"
    if found.equal_loss is not None:
        yield f"loss: {found.equal_loss}"
    looked = f", {found.pruned} of them for one short window" if found.pruned else ""
    yield (
        f"tried: {format_count(found.trials)} of {format_count(found.configurations - 1)} other ways to train{looked}; "
        f"{format_count(found.windows)} windows in {format_seconds(found.seconds)}"
    )
    yield f"the search stopped because {found.stopped_because}"
    yield from (f"not explored: {one}" for one in found.left_out)
