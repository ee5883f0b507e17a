"""Comparison of two profiles, tunings, runs or datasets.

It lists changes, and figures that differ beyond noise. Everything here is pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune.base.estimates import Estimate, change_between, reason_without_bounds
from autotune.base.interval import Interval

Kind = Literal["profile", "tuning", "run", "dataset"]
Circumstance = Literal[
    "model",
    "dataset",
    "machine",
    "processors",
    "ranks",
    "global batch",
    "row length",
    "layout",
    "memory budget",
]
Verdict = Literal[
    "faster",
    "slower",
    "more",
    "less",
    "the same",
    "the same within noise",
    "not judged",
    "not comparable",
]
"""``not judged``: the spread is not known. ``not comparable``: something differs that
the figure depends on."""

_WORK: tuple[Circumstance, ...] = ("model", "dataset", "row length")
_PLACE: tuple[Circumstance, ...] = (*_WORK, "machine", "processors", "ranks")
_OTHER: dict[Circumstance, str] = {
    "processors": "other processors",
    "ranks": "another number of ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that differs; None on the side that does not have it."""

    key: str
    old: Any
    new: Any

    @property
    def ratio(self) -> float | None:
        """Ratio of the new to the old figure; None if they are not both figures."""
        both = [
            one
            for one in (self.old, self.new)
            if isinstance(one, int | float) and not isinstance(one, bool)
        ]
        return self.new / self.old if len(both) == 2 and self.old else None


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the differences between flat tables.

    A key that only one side has counts as None on the other.
    """
    found = (
        Change(key=str(key), old=old.get(key), new=new.get(key))
        for key in {**old, **new}
    )
    return tuple(change for change in found if change.old != change.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure's name and unit, and what must match for it to be comparable."""

    name: str
    unit: Literal[
        "tokens/s", "units/s", "bytes", "share", "nats", "rows", "tokens", "samples"
    ]
    words: tuple[Verdict, Verdict] = ("less", "more")
    needs: tuple[Circumstance, ...] = (*_PLACE, "global batch")


_SPEED: tuple[Verdict, Verdict] = ("slower", "faster")
TRAINING_RATE = Metric(name="tokens/s", unit="tokens/s", words=_SPEED)
STEP_RATE = Metric(
    name="tokens/s including padding",
    unit="tokens/s",
    words=_SPEED,
    needs=(*_PLACE, "layout"),
)
WINDOW_RATE = replace(STEP_RATE, needs=(*STEP_RATE.needs, "global batch"))
DATA_WAIT = Metric(name="data wait", unit="share")
MFU = Metric(name="MFU", unit="share")
WAIT_FOR_RANKS = Metric(name="wait for other ranks", unit="share")
PEAK_MEMORY = Metric(
    name="peak memory", unit="bytes", needs=(*_WORK, "machine", "ranks")
)
LARGEST = Metric(
    name="largest micro-batch",
    unit="rows",
    needs=(*_WORK, "machine", "layout", "memory budget"),
)


def largest(size: str) -> Metric:
    """Return the metric of the largest value of an argument of yours that fits."""
    return Metric(name=f"largest {size}", unit="samples", needs=LARGEST.needs)


def unit_rate(unit: str) -> Metric:
    """Return the metric of throughput in a unit of yours, such as ``samples``."""
    return Metric(name=f"{unit}/s", unit="units/s", words=_SPEED, needs=_PLACE)


LOSS = Metric(name="loss", unit="nats", needs=(*_WORK, "global batch"))
SAMPLES, TOKENS = (
    Metric(name="samples", unit="samples", needs=()),
    Metric(name="tokens", unit="tokens", needs=()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured figure of a side."""

    metric: Metric
    of: str
    """Condition of the measurement, such as ``16 sequences``; figures are compared
    under the same condition."""
    estimate: Estimate
    exact: bool = False
    """True if the figure is a count, which has no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A profile, a tuning, a run or a dataset."""

    kind: Kind
    name: str
    settings: Mapping[str, Any]
    """Settings by dotted key, without ``train``."""
    common_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that profiles of every subject have, by the same names."""
    circumstances: Mapping[Circumstance, str]
    facts: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = ()
    headlines: tuple[Measurement, ...] = ()
    """Training speeds, the best known first."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of both sides."""

    metric: Metric
    of: str
    a: Estimate
    b: Estimate
    change: Interval
    """Ratio of B to A or, for shares on a linear scale, B minus A; with 95 % bounds."""
    verdict: Verdict = "the same within noise"
    why: str = ""
    metric_of_b: Metric | None = None
    """Metric of B, if it has another unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Verdict on whether B passes if at most a given share of A's speed may be lost."""

    state: Literal["passes", "slower", "undecided", "not comparable"]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All known differences between two sides."""

    a: Side
    b: Side
    settings: tuple[Change, ...]
    circumstances: tuple[Change, ...]
    facts: tuple[Change, ...]
    figures: tuple[Compared, ...]
    headline: Compared | None
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Figures that the other side does not have."""


def compare(
    a: Side, b: Side, loss: tuple[Measurement, Measurement, Interval] | None = None
) -> Comparison:
    """Compare two sides.

    For runs, ``loss`` holds the losses of A and B at the same steps, and the ratio of B
    to A.
    """
    known = a.circumstances.keys() & b.circumstances.keys()
    places = [
        {str(name): said for name, said in one.circumstances.items() if name in known}
        for one in (a, b)
    ]
    circumstances, facts = changes(*places), changes(a.facts, b.facts)
    if a.kind != b.kind:  # a run says less of its machine than a profile does
        facts = tuple(one for one in facts if one.key in a.facts and one.key in b.facts)
    differs = {change.key for change in circumstances}
    mine, theirs = (
        {(one.metric.name, one.of): one for one in side.measurements} for side in (a, b)
    )
    figures = [
        _compared(mine[key], theirs[key], differs) for key in mine if key in theirs
    ]
    if loss is not None:
        figures.append(_compared(loss[0], loss[1], differs, loss[2]))
    return Comparison(
        a=a,
        b=b,
        settings=_changed_settings(a, b),
        circumstances=circumstances,
        facts=facts,
        figures=tuple(figures),
        headline=_headline(a, b, differs),
        only_a=tuple(f"{name}, {of}" for name, of in mine if (name, of) not in theirs),
        only_b=tuple(f"{name}, {of}" for name, of in theirs if (name, of) not in mine),
    )


def _changed_settings(a: Side, b: Side) -> tuple[Change, ...]:
    """Return the changed settings.

    Profiles whose settings have no name in common, such as those of the bundled trainer
    and of code of yours, are compared by what all profiles have.
    """
    shared = [key for key in a.settings if key in b.settings]
    names = [key for key in shared if not key.startswith("constraints.")]
    if names or not (a.common_settings and b.common_settings):
        return changes(a.settings, b.settings)
    return changes(a.common_settings, b.common_settings)


def _headline(a: Side, b: Side, differs: set[str]) -> Compared | None:
    """Compare speeds that were measured under the same condition.

    If there are none, the best speed of each side is compared. Speeds in different
    units are not comparable.
    """
    pairs = [(of_a, of_b) for of_a in a.headlines for of_b in b.headlines]
    if not pairs:
        return None
    in_one_unit = [
        (of_a, of_b) for of_a, of_b in pairs if of_a.metric.name == of_b.metric.name
    ]
    if not in_one_unit:
        of_a, of_b = pairs[0]
        return replace(
            _compared(of_a, of_b, differs),
            of=f"A: {of_a.of}; B: {of_b.of}",
            metric_of_b=of_b.metric,
            verdict="not comparable",
            why="another unit",
        )
    alike = [(of_a, of_b) for of_a, of_b in in_one_unit if of_a.of == of_b.of]
    of_a, of_b = (alike or in_one_unit)[0]
    if of_a.of != of_b.of:
        of_a = replace(of_a, of=f"A: {of_a.of}; B: {of_b.of}")
    return _compared(of_a, of_b, differs)


def _compared(
    a: Measurement, b: Measurement, differs: set[str], change: Interval | None = None
) -> Compared:
    change = change or change_between(a.estimate, b.estimate)
    if a.exact and b.exact:
        change = replace(change, low=change.value, high=change.value, confidence=1.0)
    found = Compared(
        metric=a.metric, of=a.of, a=a.estimate, b=b.estimate, change=change
    )
    nothing = 1.0 if a.estimate.scale == "log" else 0.0
    if other := [
        _OTHER.get(name, f"another {name}")
        for name in a.metric.needs
        if name in differs
    ]:
        return replace(found, verdict="not comparable", why=", ".join(other))
    if change.low is None or change.high is None:
        return replace(
            found,
            verdict="not judged",
            why=reason_without_bounds(a.estimate, b.estimate),
        )
    if max(abs(change.low - nothing), abs(change.high - nothing)) < 1e-9:  # rounding
        return replace(found, verdict="the same")
    less, more = a.metric.words
    return replace(
        found,
        verdict=(
            less
            if change.high < nothing
            else more
            if change.low > nothing
            else found.verdict
        ),
    )


def gate(comparison: Comparison, lost_share: float) -> Gate:
    """Judge B's training speed against A's.

    ``slower``: the measured ratio is below what is allowed, and the difference exceeds
    noise. ``passes``: the whole interval lies above it. ``undecided``: noise allows
    both. ``not comparable``: the speeds are of different things.
    """
    found = comparison.headline
    if found is None:
        return Gate(
            state="not comparable", words="one side has no measured training speed"
        )
    if found.verdict == "not comparable":
        return Gate(
            state="not comparable",
            words=f"the speeds of A and B are not comparable: {found.why}",
        )
    least, change = 1 - lost_share, found.change
    told = f"B trains at {change.value:.3f} of A's {found.metric.name}"
    if change.low is None or change.high is None:
        return Gate(state="undecided", words=f"{told}, with unknown noise: {found.why}")
    told += (
        f" ({change.low:.3f} to {change.high:.3f}, 95 %); the threshold is {least:.3f}"
    )
    is_slower = change.value < least and change.high < 1
    if not is_slower and change.low < least:
        return Gate(state="undecided", words=f"{told}: noise allows both")
    return Gate(state="slower" if is_slower else "passes", words=told)
