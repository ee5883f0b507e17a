"""Bars: figures with a target, one line each.

Every benchmark shows and keeps them, and ends, the same way.
"""

import argparse
import functools
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from autotune.base.files import write_atomically
from autotune.base.readable_json import readable_json
from autotune.errors import AutotuneError
from testbed.programs import CannotMeasure
from trainer.formats.errors import TrainerError

EXIT_HELD, EXIT_SHORT, EXIT_UNMEASURED = 0, 1, 2

Direction = Literal["<=", ">="]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and its target."""

    name: str
    """Ends in the figure's unit."""
    figure: float | None
    """None if it could not be measured."""
    unit: str
    bar: float
    direction: Direction
    """Direction in which the figure may differ from the bar."""

    @property
    def holds(self) -> bool | None:
        """Whether the bar holds; None if nothing was measured."""
        if self.figure is None:
            return None
        return (
            self.figure <= self.bar
            if self.direction == "<="
            else self.figure >= self.bar
        )

    @property
    def line(self) -> str:
        """The bar as the one line that scripts look for."""
        digits = (
            "n/a"
            if self.figure is None
            else (
                f"{self.figure:.4g}"
                if abs(self.figure) < 10_000
                else f"{self.figure:.0f}"
            )
        )
        verdict = {True: "ok", False: "missed", None: "not measured"}[self.holds]
        return f"{self.name} figure={digits} bar{self.direction}{self.bar:g} {verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and whether the bar holds."""
        fields = ("name", "figure", "unit", "bar", "direction", "holds")
        return {name: getattr(self, name) for name in fields}


def bars_of(
    table: Mapping[str, tuple[str, Direction, float]],
    figures: Mapping[str, float | None],
) -> list[Bar]:
    """Return a bar for each figure: its unit, direction and bar stand in the table."""
    return [
        Bar(
            name=name,
            figure=figure,
            unit=table[name][0],
            direction=table[name][1],
            bar=table[name][2],
        )
        for name, figure in figures.items()
    ]


def lines(bars: Sequence[Bar]) -> str:
    """Return one line per bar, to be printed last."""
    return "\n".join(bar.line for bar in bars)


def exit_code(bars: Sequence[Bar]) -> int:
    """Return the exit code of a benchmark.

    Returns:
        0 if every bar holds, 1 if one is short, 2 if one could not be measured and none
        is short.
    """
    verdicts = [bar.holds for bar in bars]
    if False in verdicts:
        return EXIT_SHORT
    return EXIT_UNMEASURED if None in verdicts or not verdicts else EXIT_HELD


def keep(file: Path | None, bars: Sequence[Bar], content: Mapping[str, Any]) -> None:
    """Write the bars and the content, if anywhere."""
    if file is not None:
        write_atomically(
            file, readable_json({"bars": [bar.to_json() for bar in bars], **content})
        )


def finish(
    file: Path | None, bars: Sequence[Bar], content: Mapping[str, Any], shown: str = ""
) -> int:
    """Keep the bars and the content, print them, and return the exit code.

    ``shown`` are tables to print before the bars.
    """
    keep(file, bars, content)
    print(f"{shown}\n{lines(bars)}" if shown else lines(bars))
    return exit_code(bars)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser that knows where figures are kept."""
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there as well"
    )
    return options


Main = Callable[[Sequence[str] | None], int]


def measuring(main: Main) -> Main:
    """Let what a benchmark lacks end it with code 2 and a message."""

    @functools.wraps(main)
    def told(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except (AutotuneError, TrainerError) as error:
            sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        except ImportError as error:
            sys.stderr.write(
                f"error: {error}\n  next: python -m pip install accelerate datasets"
                " lightning\n"
            )
        except CannotMeasure as error:
            sys.stderr.write(f"error: {error}\n")
        return EXIT_UNMEASURED

    return told


def run(main: Main) -> NoReturn:
    """Run a benchmark as a program.

    SIGTERM unwinds it like Ctrl-C, so that its files and processes are removed.
    """
    warnings.filterwarnings("ignore", category=UserWarning)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(None))
