"""Bars: figures that must not be missed, one line each, and the exit code that follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and what it is held against."""

    name: str
    """Ends in the figure's unit."""
    figure: float | None
    """None where it could not be measured."""
    unit: str
    bar: float
    direction: Literal["<=", ">="]
    """How the figure must lie to the bar."""

    @property
    def holds(self) -> bool | None:
        """Whether the bar holds; None where nothing was measured."""
        if self.figure is None:
            return None
        return self.figure <= self.bar if self.direction == "<=" else self.figure >= self.bar

    @property
    def line(self) -> str:
        """The bar as the one line that scripts look for."""
        digits = (
            "n/a"
            if self.figure is None
            else f"{self.figure:.4g}"
            if abs(self.figure) < 10_000
            else f"{self.figure:.0f}"
        )
        verdict = {True: "ok", False: "short", None: "not measured"}[self.holds]
        return f"{self.name} figure={digits} bar{self.direction}{self.bar:g} {verdict}"

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether it holds."""
        return {
            "name": self.name,
            "figure": self.figure,
            "unit": self.unit,
            "bar": self.bar,
            "direction": self.direction,
            "holds": self.holds,
        }


def lines(bars: Sequence[Bar]) -> str:
    """One line per bar, to be printed last."""
    return "\n".join(bar.line for bar in bars)


def exit_code(bars: Sequence[Bar]) -> int:
    """0 when every bar holds, 1 when one is short, 2 when one could not be measured and none is short."""
    verdicts = [bar.holds for bar in bars]
    if False in verdicts:
        return EXIT_SHORT
    return EXIT_UNMEASURED if None in verdicts or not verdicts else EXIT_HELD
