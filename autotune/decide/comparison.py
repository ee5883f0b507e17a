"""Two profiles, tunings or runs held against each other: what changed, and which figures differ beyond noise. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autotune.decide.changes import Change, setting_changes
from autotune.decide.difference import Estimate, difference
from autotune.decide.statistics import Interval

Kind = Literal["profile", "tuning", "run"]
Circumstance = Literal[
    "model", "dataset", "machine", "processors", "ranks", "global batch", "row length", "layout", "memory budget"
]
Verdict = Literal[
    "faster", "slower", "more", "less", "the same", "the same within noise", "not judged", "not comparable"
]
"""``not judged``: no spread to judge by is known. ``not comparable``: something differs that the figure rests on."""

_WORK: tuple[Circumstance, ...] = ("model", "dataset", "row length")
_PLACE: tuple[Circumstance, ...] = ("machine", "processors", "ranks")


_ROUNDING = 1e-9
"""Of ratios and shares."""
_OTHER: dict[Circumstance, str] = {"processors": "other processors", "ranks": "another number of ranks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a figure is of, and what has to be the same on both sides for it to say anything."""

    name: str
    unit: Literal["tokens/s", "bytes", "share", "nats", "rows", "s"]
    words: tuple[Verdict, Verdict]
    """When B has less, and when it has more."""
    needs: tuple[Circumstance, ...]


TRAINING_RATE = Metric(
    name="real tokens/s", unit="tokens/s", words=("slower", "faster"), needs=(*_WORK, *_PLACE, "global batch")
)
STEP_RATE = Metric(name="slot tokens/s", unit="tokens/s", words=("slower", "faster"), needs=(*_WORK, *_PLACE, "layout"))
WINDOW_RATE = Metric(
    name="slot tokens/s", unit="tokens/s", words=("slower", "faster"), needs=(*_WORK, *_PLACE, "layout", "global batch")
)
DATA_WAIT = Metric(name="data wait", unit="share", words=("less", "more"), needs=(*_WORK, *_PLACE, "global batch"))
MFU = Metric(name="MFU", unit="share", words=("less", "more"), needs=(*_WORK, *_PLACE, "global batch"))
WAIT_FOR_RANKS = Metric(
    name="wait for other ranks", unit="share", words=("less", "more"), needs=(*_WORK, *_PLACE, "global batch")
)
PEAK_MEMORY = Metric(name="peak memory", unit="bytes", words=("less", "more"), needs=(*_WORK, "machine", "ranks"))
MOST_ROWS = Metric(
    name="largest micro-batch",
    unit="rows",
    words=("less", "more"),
    needs=(*_WORK, "machine", "layout", "memory budget"),
)
LOSS = Metric(name="loss", unit="nats", words=("less", "more"), needs=(*_WORK, "global batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One figure of a side."""

    metric: Metric
    of: str
    """What it was read at, such as ``16 rows``; figures are held against those read at the same."""
    estimate: Estimate
    exact: bool = False
    """Whether it is a count that was proven, which has no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A profile, a tuning or a run."""

    kind: Kind
    name: str
    settings: Mapping[str, Any]
    """By dotted key, without ``train``."""
    circumstances: Mapping[Circumstance, str]
    """Those that are known."""
    facts: Mapping[str, Any]
    """Of its machine and its software, for people."""
    readings: tuple[Reading, ...]
    headlines: tuple[Reading, ...]
    """How fast it trains, the best known first."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of both sides."""

    metric: Metric
    of: str
    a: Estimate
    b: Estimate
    change: Interval
    """What B is of A; for shares, what B is more than A. With 95 % bounds."""
    verdict: Verdict
    why: str = ""
    """Why there is no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that is known of the difference between two sides."""

    a: Side
    b: Side
    settings: tuple[Change, ...]
    circumstances: tuple[Change, ...]
    facts: tuple[Change, ...]
    figures: tuple[Compared, ...]
    headline: Compared | None
    """How fast they train."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Figures that the other side does not have."""


def compare(a: Side, b: Side, loss: tuple[Estimate, Estimate, Interval, str] | None = None) -> Comparison:
    """Hold two sides against each other.

    Args:
        a: The first, which ratios are to.
        b: The second.
        loss: Of runs the loss of each at the same steps, what B's is of A's, and which steps; None without such.
    """
    known = [name for name in a.circumstances if name in b.circumstances]
    circumstances = setting_changes(
        {str(name): a.circumstances[name] for name in known}, {str(name): b.circumstances[name] for name in known}
    )
    differs = {change.key: change for change in circumstances}
    theirs = {(one.metric.name, one.of): one for one in b.readings}
    mine = {(one.metric.name, one.of): one for one in a.readings}
    figures = [_compared(mine[key], theirs[key], differs) for key in mine if key in theirs]
    if loss is not None:
        first, second, change, of = loss
        figures.append(_judged(LOSS, of, (first, second), change, differs))
    return Comparison(
        a=a,
        b=b,
        settings=setting_changes(a.settings, b.settings),
        circumstances=circumstances,
        facts=_fact_changes(a, b),
        figures=tuple(figures),
        headline=_headline(a.headlines, b.headlines, differs),
        only_a=tuple(f"{name}, {of}" for name, of in mine if (name, of) not in theirs),
        only_b=tuple(f"{name}, {of}" for name, of in theirs if (name, of) not in mine),
    )


def _fact_changes(a: Side, b: Side) -> tuple[Change, ...]:
    """What differs of what both tell: a run says less of its machine than a profile does."""
    found = setting_changes(a.facts, b.facts)
    return found if a.kind == b.kind else tuple(one for one in found if one.key in a.facts and one.key in b.facts)


def _headline(a: Sequence[Reading], b: Sequence[Reading], differs: Mapping[str, Change]) -> Compared | None:
    """By what both were read in the same way, if there is such; else by the best of each."""
    same = [(one, other) for one in a for other in b if one.of == other.of]
    if same:
        return _compared(*same[0], differs)
    if not a or not b:
        return None
    sides = a[0].estimate, b[0].estimate
    return _judged(a[0].metric, f"A: {a[0].of}; B: {b[0].of}", sides, difference(*sides), differs)


def _compared(a: Reading, b: Reading, differs: Mapping[str, Change]) -> Compared:
    change = difference(a.estimate, b.estimate)
    if a.exact and b.exact:
        change = Interval(value=change.value, low=change.value, high=change.value)
    return _judged(a.metric, a.of, (a.estimate, b.estimate), change, differs)


def _judged(
    metric: Metric, of: str, sides: tuple[Estimate, Estimate], change: Interval, differs: Mapping[str, Change]
) -> Compared:
    verdict, why = _verdict(metric, sides, change, differs)
    return Compared(metric=metric, of=of, a=sides[0], b=sides[1], change=change, verdict=verdict, why=why)


def _verdict(
    metric: Metric, sides: tuple[Estimate, Estimate], change: Interval, differs: Mapping[str, Change]
) -> tuple[Verdict, str]:
    if other := [_OTHER.get(name, f"another {name}") for name in metric.needs if name in differs]:
        return "not comparable", ", ".join(other)
    if change.low is None or change.high is None:
        return "not judged", "; ".join(dict.fromkeys(one.no_spread for one in sides if one.variance is None))
    nothing = 1.0 if sides[0].scale == "log" else 0.0
    if max(abs(change.low - nothing), abs(change.high - nothing)) < _ROUNDING:
        return "the same", ""
    if change.high < nothing:
        return metric.words[0], ""
    if change.low > nothing:
        return metric.words[1], ""
    return "the same within noise", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Whether B may pass where no more than some share of A's speed may be lost."""

    state: Literal["passes", "slower", "undecided", "not comparable"]
    words: str


def gate(comparison: Comparison, lost_share: float) -> Gate:
    """Judge B's training speed against A's.

    ``slower``: the measured ratio is below what is allowed, and the difference is beyond noise. ``passes``: the whole
    interval lies above it. ``undecided``: neither is proven. ``not comparable``: the speeds are of different things.

    Args:
        comparison: Of A and B.
        lost_share: What B may lose, between 0 and 1.
    """
    found = comparison.headline
    if found is None:
        return Gate(state="not comparable", words="one side has no speed of training that was measured")
    if found.verdict == "not comparable":
        return Gate(state="not comparable", words=f"the speeds of A and B cannot be compared: {found.why}")
    least, change = 1 - lost_share, found.change
    told = f"B trains at {change.value:.3f} of A's {found.metric.name}"
    if change.low is None or change.high is None:
        return Gate(state="undecided", words=f"{told}, of unknown noise: {found.why}")
    told += f" ({change.low:.3f} to {change.high:.3f}, 95 %), and {least:.3f} is the least allowed"
    if change.value < least and change.high < 1:
        return Gate(state="slower", words=told)
    if change.low >= least:
        return Gate(state="passes", words=told)
    return Gate(state="undecided", words=f"{told}: noise leaves it open")
