"""What the GPU check finds: figures that say how they were come by, stages, and the file that holds them."""

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show.tables import text_table

Label = Literal["measured", "predicted", "not measured"]
Status = Literal["measured", "failed", "not measured"]

SCHEMA_VERSION = 1
NO_TIME = "no time left"
NOT_REACHED = "the check was cut off before it"
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
    """Where a stage writes its figures as they come, so that a stage that fails keeps those it had."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.details: dict[str, Any] = {}

    def measured(self, name: str, value: float | None, *, expected: float | None = None, lacking: str = "") -> None:
        """Write a measured figure; a missing one is kept as not measured, with the reason."""
        if value is None:
            self.missing(name, lacking or "this machine does not give it")
        else:
            self.figures.append(Figure(name=name, label="measured", value=value, expected=expected))

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
    seconds: float = 0.0
    box_s: float = 0.0
    """Time that it was allowed."""
    figures: tuple[Figure, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    """Why it failed or was not measured."""
    traceback_tail: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The whole check; stages that have not run yet stand as not measured."""

    tool_version: str
    started_utc: str
    device: str
    sizes: str
    limit_s: float
    finished: bool
    stages: tuple[StageResult, ...]

    def to_json(self) -> dict[str, Any]:
        """All fields, and the version of this layout."""
        return {"schema_version": SCHEMA_VERSION} | asdict(self)

    @property
    def exit_code(self) -> int:
        """0 when all stages measured, 2 when none did, else 1."""
        measured = [stage.status == "measured" for stage in self.stages]
        return 0 if measured and all(measured) else 1 if any(measured) else 2


def report_table(report: CheckReport) -> str:
    """One line per figure and per stage that did not measure; what is missing for one reason shares a line."""
    rows: list[list[str | None]] = []
    for stage in report.stages:
        if stage.status != "measured":
            rows.append([stage.name, "", stage.status, _first_line(stage.reason), ""])
        for (reason, _), group in itertools.groupby(stage.figures, key=_alike):
            figures = list(group)
            name = figures[0].name + (f" and {len(figures) - 1} more" if len(figures) > 1 else "")
            value = _first_line(reason) if reason else _shown(figures[0].name, figures[0].value)
            rows.append([stage.name, name, figures[0].label, value, _expected(figures[0])])
    return text_table(["stage", "figure", "label", "value", "expected"], rows, align="lllrr")


def _alike(figure: Figure) -> tuple[str | None, str]:
    """Neighbours that are missing for the same reason are alike; any other figure stands alone."""
    return figure.reason, "" if figure.reason else figure.name


def _expected(figure: Figure) -> str:
    return "" if figure.expected is None else _shown(figure.name, figure.expected)


def _first_line(text: str | None) -> str:
    line = (text or "").strip().partition("\n")[0]
    return line if len(line) <= REASON_WIDTH else f"{line[: REASON_WIDTH - 1]}…"


def _shown(name: str, value: float | None) -> str:
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
