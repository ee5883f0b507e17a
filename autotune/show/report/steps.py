"""Where a step's time goes."""

from collections.abc import Sequence

from autotune.core.bottleneck import Bottleneck, Cause, StepPart
from autotune.core.units import format_share
from autotune.show.document import Block, Bullets, Chart, Missing, Section, Strong, Table, Words
from autotune.show.drawing import Axis, Stack, Stacks
from autotune.show.intervals import bounds, plural, with_interval
from autotune.show.report.inputs import ReportedProfile, ReportedRun

_CAUSES: dict[Cause, str] = {
    "computation": "computing real tokens",
    "padding": "computing padding",
    "input": "waiting for data",
    "network": "waiting for gradients",
    "straggler": "waiting for the slowest rank",
    "host": "waiting for the program",
    "memory": "waiting for the device's memory",
    "update": "clipping and update",
}
"""In the order in which bars have them."""


def cause_words(cause: Cause) -> str:
    """What a part of a step goes into."""
    return _CAUSES[cause]


def steps(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """The tuning's steps and those of the profile's runs, side by side."""
    tuning = [(found.source or "the tuning", found) for found in one.bottlenecks]
    of_runs = [(run.name, found) for run in runs if run.profile_path == one.path for found in run.bottlenecks]
    return _breakdown([*tuning, *of_runs], train_commands(one))


def _breakdown(named: Sequence[tuple[str, Bottleneck]], commands: tuple[str, ...]) -> tuple[Block, ...]:
    """A bar for each, the parts as a table, and what limits it in words."""
    if not named:
        return (Missing(what="Where a step's time goes (the record of a run says)", commands=commands),)
    stacks = tuple(Stack(label=name, parts=_stack(found)) for name, found in named)
    chart = Chart(
        title="Parts of a step",
        description=" ".join(f"{name}: {_parts_words(found)}." for name, found in named),
        drawing=Stacks(axis=Axis(label="share of a step", unit="share"), stacks=stacks),
        table=Table(
            caption="The same as figures",
            headers=("steps of", "time goes into", "share", "95 % interval", "read from"),
            rows=tuple(_cells(name, part) for name, found in named for part in found.parts),
            align="llrrl",
        ),
    )
    return (chart, Bullets(items=tuple(item for name, found in named for item in _limit(name, found))))


def train_commands(one: ReportedProfile) -> tuple[str, ...]:
    """A run of the profile, and a report with it."""
    ranks = one.profile.local_ranks
    train = f"torchrun --nproc-per-node {ranks} -m trainer --profile {one.quoted} --data DIR --out runs/NAME"
    return (train, f"autotune report build {one.quoted} --run runs/NAME")


def _stack(found: Bottleneck) -> tuple[tuple[str, float], ...]:
    parts = {part.cause: part.share for part in found.parts}
    return tuple((words, parts[cause]) for cause, words in _CAUSES.items() if parts.get(cause, 0.0) > 0)


def _parts_words(found: Bottleneck) -> str:
    return ", ".join(f"{_CAUSES[part.cause]} {format_share(part.share)}" for part in found.parts)


def _cells(name: str, part: StepPart) -> list[str | None]:
    return [
        name,
        _CAUSES[part.cause],
        format_share(part.share),
        bounds(part.low, part.high, format_share),
        part.source or None,
    ]


def _limit(name: str, found: Bottleneck) -> list[Words]:
    limit = "Nothing but computing" if found.limit == "computation" else _CAUSES[found.limit].capitalize()
    decided = "" if found.decided else " (the interval leaves it open)"
    mfu = f"MFU {with_interval(found.mfu, format_share)}" if found.mfu else ""
    peak = mfu or "MFU is not known, as the device's peak is not"
    rest = f" limits it{decided}; {peak}; {plural(found.steps, 'reading')}."
    limited: Words = (f"{name}: ", Strong(text=limit), rest)
    return [limited, *((f"{name}: not told: {one}.",) for one in found.untold)]


def runs_only(runs: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """Of runs whose profile is not in the report."""
    found = [(run.name, found) for run in runs for found in run.bottlenecks]
    if not found:
        return ()
    title = "Runs that have no profile in this report"
    return (Section(title=title, key="steps-of-runs", blocks=_breakdown(found, ())),)
