"""What the GPU check finds: figures that say how they were come by, stages, and the file that holds them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show.tables import text_table
from benchmarks.bars import Bar, lines

Label = Literal["measured", "allocator", "predicted", "not measured"]
"""``allocator``: a size by torch's allocator on a pretended GPU."""
Status = Literal["measured", "failed", "not measured", "not asked for"]

SCHEMA_VERSION = 3
NO_TIME = "no time left"
NOT_REACHED = "the check was cut off before it"
NOT_ASKED = "left out by --only"
REASON_WIDTH = 60
"""Characters of a reason that the table shows; the file has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure."""

    name: str
    """Ends in its unit."""
    label: Label
    value: float | None = None
    expected: float | None = None
    """What it should be, where that is known from elsewhere: the load that a reading was taken under."""
    reason: str | None = None
    """Why it was not measured."""


class Sheet:
    """Where a stage writes its figures as they come, so that a stage that fails keeps those it had.

    Args:
        pretended: Whether the GPU is a pretended one: only sizes can be had of it.
    """

    def __init__(self, *, pretended: bool = False) -> None:
        self.figures: list[Figure] = []
        self.details: dict[str, Any] = {}
        self._pretended = pretended

    def measured(self, name: str, value: float | None, *, expected: float | None = None, lacking: str = "") -> None:
        """Write a measured figure; one that is missing or no number is kept as not measured, with the reason."""
        if value is None:
            self.missing(name, lacking or "this machine does not give it")
        elif not math.isfinite(value):
            self.missing(name, f"it is {value}")
        elif "_mfu_" in name and value > 1:
            self.missing(name, f"it is {value:.3g}, and no GPU does more than its peak")
        elif self._pretended and not name.endswith(("_bytes", "_count")) and "_error_" not in name:
            self.missing(name, "the GPU is a pretended one: only sizes can be had of it")
        else:
            label: Label = "allocator" if self._pretended else "measured"
            self.figures.append(Figure(name=name, label=label, value=value, expected=expected))

    def predicted(self, name: str, value: float | None, *, lacking: str = "") -> None:
        """Write a figure that follows from others."""
        if value is None:
            self.missing(name, lacking or "nothing to predict from")
        else:
            self.figures.append(Figure(name=name, label="predicted", value=value))

    def missing(self, name: str, reason: str) -> None:
        """Say that a figure could not be had."""
        self.figures.append(Figure(name=name, label="not measured", reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What became of one stage."""

    name: str
    status: Status
    measured_utc: str | None = None
    """When it began; None where it did not."""
    seconds: float = 0.0
    box_s: float = 0.0
    """Time that it was allowed."""
    figures: tuple[Figure, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    made_with: dict[str, str | None] = field(default_factory=dict)
    """What it was measured with and what it depends on, by ``made_with``."""
    reason: str | None = None
    """Why it failed or was not measured."""
    traceback_tail: str | None = None

    @classmethod
    def of(cls, found: dict[str, Any]) -> "StageResult":
        """Read what ``asdict`` wrote."""
        return cls(**found | {"figures": tuple(Figure(**figure) for figure in found["figures"])})

    def figure(self, name: str) -> Figure | None:
        """The figure of that name, as it was written last."""
        return next((figure for figure in reversed(self.figures) if figure.name == name), None)

    def value(self, name: str) -> float | None:
        """Its value; None where there is none."""
        figure = self.figure(name)
        return None if figure is None else figure.value


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The whole check; stages that have not run yet stand as not measured."""

    tool_version: str
    started_utc: str
    device: str
    """As files are named after it."""
    sizes: str
    limit_s: float
    finished: bool
    stages: tuple[StageResult, ...]
    bars: tuple[Bar, ...] = ()
    """Empty for tiny sizes, of which none is asked."""

    def to_json(self) -> dict[str, Any]:
        """All fields, and the version of this layout."""
        bars = [bar.to_json() for bar in self.bars]
        plain: dict[str, Any] = _plain({"schema_version": SCHEMA_VERSION} | asdict(self) | {"bars": bars})
        return plain

    @classmethod
    def of(cls, found: dict[str, Any]) -> "CheckReport":
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: If it is of another version.
        """
        if found.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"the check's layout is of version {found.get('schema_version')}, not {SCHEMA_VERSION}")
        fields = {name: found[name] for name in ("tool_version", "started_utc", "device", "sizes", "limit_s")}
        bars = tuple(Bar(**{name: bar[name] for name in _BAR_FIELDS}) for bar in found["bars"])
        stages = tuple(map(StageResult.of, found["stages"]))
        return cls(**fields, finished=found["finished"], stages=stages, bars=bars)

    def stage(self, name: str) -> StageResult:
        """What became of a stage; one that this check did not know was not measured."""
        missing = StageResult(name=name, status="not measured", reason="the check did not have it")
        return next((stage for stage in self.stages if stage.name == name), missing)

    @property
    def exit_code(self) -> int:
        """0 when all that was asked for was measured and no bar is short, 2 when nothing was measured, else 1."""
        measured = [stage.status == "measured" for stage in self.stages if stage.status != "not asked for"]
        short = any(bar.holds is False for bar in self.bars)
        return 2 if not any(measured) else 0 if all(measured) and not short else 1


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """With words for numbers that JSON does not have: one odd detail must not cost the report."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


_BAR_FIELDS = ("name", "figure", "unit", "bar", "direction")


def bars_text(bars: Sequence[Bar]) -> str:
    """One line per bar; nothing for none."""
    return f"\n{lines(bars)}" if bars else ""


def report_table(report: CheckReport) -> str:
    """One line per figure and per stage that did not measure; what is missing for one reason shares a line."""
    rows: list[list[str | None]] = []
    for stage in report.stages:
        if stage.status != "measured":
            rows.append([stage.name, "", stage.status, _first_line(stage.reason), ""])
        for (reason, _), group in itertools.groupby(stage.figures, key=_alike):
            figures = list(group)
            name = figures[0].name + (f" and {len(figures) - 1} more" if len(figures) > 1 else "")
            value = _first_line(reason) if reason else shown_value(figures[0].name, figures[0].value)
            rows.append([stage.name, name, figures[0].label, value, _expected(figures[0])])
    return text_table(["stage", "figure", "label", "value", "expected"], rows, align="lllrr")


def _alike(figure: Figure) -> tuple[str | None, str]:
    """Neighbours that are missing for the same reason are alike; any other figure stands alone."""
    return figure.reason, "" if figure.reason else figure.name


def _expected(figure: Figure) -> str:
    return "" if figure.expected is None else shown_value(figure.name, figure.expected)


def _first_line(text: str | None) -> str:
    line = (text or "").strip().partition("\n")[0]
    return line if len(line) <= REASON_WIDTH else f"{line[: REASON_WIDTH - 1]}…"


def shown_value(name: str, value: float | None) -> str:
    """A value in the unit that its name ends in."""
    if value is None:
        return "n/a"
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith("_per_s"):
        return format_count(value)
    for unit, show in (("_bytes", format_bytes), ("_share", format_share), ("_s", format_seconds)):
        if name.endswith(unit):
            return show(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
