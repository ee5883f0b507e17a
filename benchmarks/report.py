"""``python -m benchmarks.report``: a report's size, time, and view in a browser.

* size and time: a made-up tuning on GPUs with every kind of evidence and 2,000 trials.
  Time is that of whole processes ``python -m autotune report``, imports included, the
  median of a few; size is that of the HTML file.
* browser: the same with bottlenecks, advice, an approval and a second profile, opened
  in Debian's Chromium without a network at three widths, in both colour schemes and as
  it prints. Counted are requests, console messages, and pages wider than their window.
* hostile: every text ends in tags, handlers, quotes, a formula, a change of direction
  and 10,000 letters. What counts is each element that is a script, each attribute that
  holds one, each dialog, and each text that is not shown as text.
* axe: serious and critical violations that axe-core finds in both colours, on a wide
  window and a narrow one.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.base.render_html import report_html
from autotune.base.tables import text_table
from autotune.base.units import format_bytes
from autotune.report.page import report_document
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from testbed.browser import HOSTILE, PAPER_PX, SERIOUS, audit, taken_in, visit
from testbed.examples.tuning import example_inputs
from testbed.examples.tuning_files import write_example
from testbed.programs import run_program

TRIALS, REPEATS, HOSTILE_TRIALS = 2000, 5, 40
TIMEOUT_S = 120.0
WIDTHS = (360, 1400, 1600)
LOOKS: tuple[tuple[int, Literal["light", "dark"]], ...] = (
    (360, "light"),
    (1400, "light"),
    (1400, "dark"),
)
BARS: dict[str, tuple[str, Direction, float]] = {
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


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print, write, and return the exit code."""
    options_of = parser("report", "Reports in files and browsers.")
    options_of.add_argument(
        "--trials", type=int, default=TRIALS, help="in the trial log"
    )
    options_of.add_argument(
        "--repeats", type=int, default=REPEATS, help="processes that are timed"
    )
    options = options_of.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="report-") as directory:
        figures = {
            "built": built(Path(directory), options.trials, options.repeats),
            "browser": browsed(Path(directory), options.trials),
        }
    return finish(options.json, make_bars(figures), figures, table(figures))


def make_bars(figures: Figures) -> list[Bar]:
    """Return all bars, in their order."""
    built_, browser = figures["built"], figures["browser"]
    values = (
        max(built_["bytes"]["html"], browser["full_bytes"]),
        statistics.median(built_["seconds"]),
        browser["requests"],
        browser["console_errors"],
        browser["page_errors"],
        browser["overflow_px"],
        sum(browser["hostile"].values()),
        len(browser["violations"]),
    )
    return bars_of(BARS, dict(zip(BARS, values, strict=True)))


def table(figures: Figures) -> str:
    """Return the table of all measurements."""
    built_, browser = figures["built"], figures["browser"]
    rows = [
        [f"report.{name}", format_bytes(size)] for name, size in built_["bytes"].items()
    ]
    rows += [
        [
            "the same with advice and a second profile",
            format_bytes(browser["full_bytes"]),
        ],
        [
            "processes timed",
            ", ".join(f"{seconds:.2f} s" for seconds in built_["seconds"]),
        ],
        ["pages opened", str(browser["visits"])],
        ["of any impact, axe-core", str(browser["violations_of_any_impact"])],
    ]
    return text_table(("what", "figure"), rows, align="lr")


def built(directory: Path, trials: int, repeats: int) -> Figures:
    """Return sizes of the three files, and the seconds of each process that wrote them.

    Raises:
        CannotMeasure: If a process failed.
    """
    profile, reports, run = write_example(directory, trials)
    out = directory / "built" / "report.html"
    command = [
        sys.executable,
        "-m",
        "autotune",
        "report",
        str(profile),
        "--run",
        str(run),
    ]
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run_program(
            [*command, "--reports", str(reports), "--out", str(out)],
            timeout_s=TIMEOUT_S,
        )
        seconds.append(time.perf_counter() - started)
    sizes = {
        name: out.with_suffix(f".{name}").stat().st_size
        for name in ("html", "md", "json")
    }
    return {"trials": trials, "seconds": seconds, "bytes": sizes}


def browsed(directory: Path, trials: int) -> Figures:
    """Return what happened in the browser, with harmless and with hostile texts.

    Raises:
        CannotMeasure: If there is no browser.
    """
    page, hostile = directory / "full.html", directory / "hostile.html"
    page.write_text(
        report_html(report_document(*example_inputs(trials))), encoding="utf-8"
    )
    hostile.write_text(
        report_html(report_document(*example_inputs(HOSTILE_TRIALS, HOSTILE))),
        encoding="utf-8",
    )
    plain = [visit(page, width=width) for width in WIDTHS]
    plain += [visit(page, colours="dark"), visit(page, width=PAPER_PX, media="print")]
    attacked = [visit(hostile, width=width) for width in WIDTHS]
    page_visits = [*plain, *attacked]
    violations = [
        violation
        for page_file in (page, hostile)
        for width, colours in LOOKS
        for violation in audit(page_file, width=width, colours=colours)
    ]
    return {
        "full_bytes": page.stat().st_size,
        "visits": len(page_visits),
        "requests": sum(len(page_visit.requests) for page_visit in page_visits),
        "console_errors": sum(
            len(page_visit.console_errors) for page_visit in page_visits
        ),
        "page_errors": sum(len(page_visit.page_errors) for page_visit in page_visits),
        "overflow_px": max(page_visit.wider_by_px for page_visit in page_visits),
        "hostile": taken_in(attacked[0]),
        "violations": [
            f"{violation.rule}: {violation.example}"
            for violation in violations
            if violation.impact in SERIOUS
        ],
        "violations_of_any_impact": len(violations),
    }


if __name__ == "__main__":
    run(main)
