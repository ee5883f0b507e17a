"""``python -m benchmarks.report``: how large a report is, how soon it is there, and what a browser makes of it.

* size and time: a made-up tuning on GPUs with every kind of evidence and 2,000 trials. Time is that of whole processes
  ``python -m autotune report build``, imports included, the median of a few; size is that of the HTML file.
* browser: the same with bottlenecks, advice, a sign-off and a second profile, opened in Debian's Chromium without a
  network at three widths, in both colours and as it prints: what it asks for beside itself, what it complains of, and
  whether it is wider than its window.
* hostile: every text ends in tags, handlers, quotes, a formula, a change of direction and 10,000 letters. What counts
  is each element that is a script, each attribute that holds one, each dialog, and each text that is not shown as text.
* axe: serious and critical violations that axe-core finds in both colours, on a wide window and a narrow one.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.core.units import format_bytes
from autotune.show.report.build import report_document
from autotune.show.report.html import report_html
from autotune.show.tables import text_table
from autotune.store import json_rows, write_atomically
from benchmarks.bars import EXIT_UNMEASURED, Bar, exit_code, lines
from benchmarks.browser import CannotBrowse, Violation, Visit, audit, visit
from benchmarks.example_files import write_example
from benchmarks.example_report import example_inputs

TRIALS, REPEATS, HOSTILE_TRIALS = 2000, 5, 40
TIMEOUT_S = 120.0
WIDTHS = (360, 1400, 1600)
PAPER_PX = 690
"""What is left of a page of A4 between its margins."""
SERIOUS = ("serious", "critical")
LONG = 10_000
HOSTILE = (
    "</title></style></script><script>alert(1)</script><img src=https://e.example/x onerror=alert(2)>"
    "\"'` onload=alert(3) style=color:red $\\frac{1}{2}$ | \u202egnp\u2066.exe\n\0 " + "A" * LONG
)
SHOWN = ("<script>alert(1)</script>", "onerror=alert(2)", "\\u202egnp", "$\\frac{1}{2}$")
"""Texts of the hostile ones that must be seen on the page, letter by letter."""
BARS: dict[str, tuple[str, Literal["<=", ">="], float]] = {
    "report_size_bytes": ("bytes", "<=", 1_500_000),
    "report_build_s": ("s", "<=", 8),
    "report_requests_count": ("count", "<=", 0),
    "report_console_errors_count": ("count", "<=", 0),
    "report_page_errors_count": ("count", "<=", 0),
    "report_overflow_px": ("px", "<=", 0),
    "report_hostile_count": ("count", "<=", 0),
    "report_axe_serious_count": ("count", "<=", 0),
}

Figures = dict[str, Any]


class CannotMeasure(Exception):
    """A report was not built."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Reports in files and browsers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--trials", type=int, default=TRIALS, help="in the ledger")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes that are timed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="report-") as directory:
        try:
            figures = {
                "built": built(Path(directory), options.trials, options.repeats),
                "browser": browsed(Path(directory), options.trials),
            }
        except (CannotMeasure, CannotBrowse) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_UNMEASURED
    bars = make_bars(figures)
    if options.json:
        content = {"bars": [bar.to_json() for bar in bars], **figures}
        write_atomically(options.json, json_rows(content))
    print(table(figures))
    print(lines(bars))
    return exit_code(bars)


def make_bars(figures: Figures) -> list[Bar]:
    """All of them, in their order."""
    built_, browser = figures["built"], figures["browser"]
    values = {
        "report_size_bytes": max(built_["bytes"]["html"], browser["full_bytes"]),
        "report_build_s": statistics.median(built_["seconds"]),
        "report_requests_count": browser["requests"],
        "report_console_errors_count": browser["console_errors"],
        "report_page_errors_count": browser["page_errors"],
        "report_overflow_px": browser["overflow_px"],
        "report_hostile_count": sum(browser["hostile"].values()),
        "report_axe_serious_count": len(browser["violations"]),
    }
    return [
        Bar(name=name, figure=values[name], unit=unit, bar=bar, direction=direction)
        for name, (unit, direction, bar) in BARS.items()
    ]


def table(figures: Figures) -> str:
    """What was looked at, for people."""
    built_, browser = figures["built"], figures["browser"]
    rows = [[f"report.{name}", format_bytes(size)] for name, size in built_["bytes"].items()]
    rows += [
        ["the same with advice and a second profile", format_bytes(browser["full_bytes"])],
        ["processes timed", ", ".join(f"{seconds:.2f} s" for seconds in built_["seconds"])],
        ["pages opened", str(browser["visits"])],
        ["of any impact, axe-core", str(browser["violations_of_any_impact"])],
    ]
    return text_table(("what", "figure"), rows, align="lr")


def built(directory: Path, trials: int, repeats: int) -> Figures:
    """Sizes of the three files, and the seconds of each process that wrote them.

    Raises:
        CannotMeasure: If one failed.
    """
    profile, reports, run = write_example(directory, trials)
    out = directory / "built" / "report.html"
    command = [sys.executable, "-m", "autotune", "report", "build", str(profile), "--run", str(run)]
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--reports", str(reports), "--out", str(out)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
        if done.returncode:
            raise CannotMeasure(f"report build ended with code {done.returncode}: {done.stderr[-500:]}")
    sizes = {name: out.with_suffix(f".{name}").stat().st_size for name in ("html", "md", "json")}
    return {"trials": trials, "seconds": seconds, "bytes": sizes}


def browsed(directory: Path, trials: int) -> Figures:
    """What happened in the browser, with harmless and with hostile texts.

    Raises:
        CannotBrowse: If there is none.
    """
    page, hostile = directory / "full.html", directory / "hostile.html"
    page.write_text(report_html(report_document(*example_inputs(trials))), encoding="utf-8")
    hostile.write_text(report_html(report_document(*example_inputs(HOSTILE_TRIALS, HOSTILE))), encoding="utf-8")
    plain = [visit(page, width=width) for width in WIDTHS]
    plain += [visit(page, colours="dark"), visit(page, width=PAPER_PX, media="print")]
    attacked = [visit(hostile, width=width) for width in WIDTHS]
    every = [*plain, *attacked]
    found = [
        violation
        for one in (page, hostile)
        for width, colours in ((WIDTHS[0], "light"), (WIDTHS[1], "light"), (WIDTHS[1], "dark"))
        for violation in audit(one, width=width, colours="dark" if colours == "dark" else "light")
    ]
    return {
        "full_bytes": page.stat().st_size,
        **_seen(every),
        "hostile": taken_in(attacked[0]),
        "violations": _serious(found),
        "violations_of_any_impact": len(found),
    }


def _seen(visits: Sequence[Visit]) -> Figures:
    return {
        "visits": len(visits),
        "requests": sum(len(one.requests) for one in visits),
        "console_errors": sum(len(one.console_errors) for one in visits),
        "page_errors": sum(len(one.page_errors) for one in visits),
        "overflow_px": max(one.wider_by_px for one in visits),
    }


def _serious(found: Sequence[Violation]) -> list[str]:
    return [f"{one.rule}: {one.example}" for one in found if one.impact in SERIOUS]


def taken_in(one: Visit) -> dict[str, int]:
    """What of a hostile page is more than text, and which texts are not shown."""
    return {
        "scripts": one.scripts,
        "handlers": one.handlers,
        "dialogs": len(one.dialogs),
        "not_shown": sum(text not in one.text for text in SHOWN),
        "steering": sum(letter in one.text for letter in "\u202e\u2066\0"),
        "uncut": int("A" * (LONG // 2) in one.text),
    }


if __name__ == "__main__":
    sys.exit(main())
