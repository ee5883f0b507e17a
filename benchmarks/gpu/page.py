"""The page of results: for each GPU, its claims and the tables behind them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.base.tables import markdown_table
from autotune.base.units import (
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from benchmarks.gpu.claims import CLAIMS, Figures
from benchmarks.gpu.results import KEPT, ROOT, read_checks

PAGE = ROOT / "docs" / "reference" / "gpu.md"
MARK = "<!-- Written by make gpu-check from here on. -->"
TITLES = {
    "promised": "Promised and delivered",
    "step": "Settings of a step, one at a time",
    "shapes": "Dynamic and static shapes of compiled layers",
    "training": "Training, loop included",
    "trainers": "Other trainers on the same data",
    "capped": "Memory under the cap of a smaller GPU (speed is not carried over)",
    "residual": "Losses with either dtype of the residual stream",
    "memory": "Memory, predicted and measured",
    "own_code": "Your own code, with 2 GB",
    "workers": "DataLoader workers",
    "imitations": "Imitations of other trainers inside this one",
    "network": "Gradient synchronisation",
    "single": "Single figures",
}
"""Tables, in order, with their titles."""
Check = Mapping[str, Any]


def page(written: str, kept: Path) -> str:
    """Return the page with its hand-written part, and all kept checks after the mark.

    Args:
        written: The page as it is.
        kept: Directory of kept checks.
    """
    checks = [check for _, check in read_checks(kept.glob("*/*"))]
    return f"{written.partition(MARK)[0]}{MARK}\n\n{results(checks)}"


def write_page() -> None:
    """Write the results of all kept checks into the documentation."""
    write_atomically(PAGE, page(PAGE.read_text(), KEPT))


def results(checks: Sequence[Check]) -> str:
    """Return every claim with its target, per GPU, and the tables behind it.

    Of repeated figures, the newest is shown. Without a check, the stages that would
    measure the claims are named.
    """
    checks = sorted(checks, key=lambda check: str(check["started_utc"]), reverse=True)
    blocks = [] if checks else [_claims({})]
    for name in dict.fromkeys(check["name"] for check in checks):
        of_gpu = [check for check in checks if check["name"] == name]
        figures = newest_figures(of_gpu)
        blocks += [f"### {_heading(of_gpu)}", _conditions(of_gpu), _claims(figures)]
        for table, title in TITLES.items():
            if rows := figures.get(table):
                blocks += [f"**{title}**", _table(rows)]
    return "\n\n".join(blocks) + "\n"


def newest_figures(checks: Sequence[Check]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables, the newest of each name, with their dates.

    Args:
        checks: Checks of one kind of GPU, the newest first.
    """
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for check in checks:
        for table, rows in check["figures"].items():
            for row in rows:
                name = str(next(iter(row.values())))
                dated = {**row, "date": check["started_utc"][:10]}
                tables.setdefault(table, {}).setdefault(name, dated)
    return {table: list(rows.values()) for table, rows in tables.items()}


def _heading(checks: Sequence[Check]) -> str:
    made_with = checks[0]["made_with"]
    return f"{made_with['gpus']} x {made_with['gpu']}"


def _conditions(checks: Sequence[Check]) -> str:
    lines = []
    for check in checks:
        made_with = check["made_with"]
        lines.append(
            f"{check['started_utc'][:10]}: driver {made_with['driver']}, torch"
            f" {made_with['torch']}, transformers {made_with['transformers']}."
        )
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows, whose columns are those of any of them."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "date"))
    head = [*(_headed(key) for key in keys), "date"]
    cells = [
        [*(_cell(row, key) for key in keys), str(row.get("date", "n/a"))]
        for row in rows
    ]
    return markdown_table(head, cells, align="l" + "r" * len(keys))


def _cell(row: Mapping[str, Any], key: str) -> str:
    """Show a value; a figure that stands alone has its unit in its name."""
    named = row["figure"] if key == "value" else key
    return number(named, row.get(key))


def _headed(key: str) -> str:
    """Show a key as a column's title; its unit stands in the cells."""
    for unit in ("_bytes", "_share", "_ratio"):
        key = key.removesuffix(unit)
    if key.endswith("_ms"):
        key = f"{key.removesuffix('_ms')}, ms"
    key = key.replace("_per_s", "/s").removesuffix("_s").replace("_to_", " ÷ ")
    return key.replace("mfu", "MFU").replace("gpu", "GPU").replace("_", " ")


def _claims(figures: Figures) -> str:
    rows = [
        "| claim | measured | target | | stages that measure it |",
        "|---|---:|---:|---|---|",
    ]
    verdicts = {True: "ok", False: "**below target**", None: "not measured"}
    for claim in CLAIMS:
        bar = claim.bar(figures)
        sign = "≥" if bar.direction == ">=" else "≤"
        rows.append(
            f"| {claim.meaning} | {number(bar.name, bar.figure)} |"
            f" {sign} {number(bar.name, bar.bar)} | {verdicts[bar.holds]} |"
            f" `--only {claim.measured_by}` |"
        )
    return "\n".join(rows)


def number(name: str, value: str | float | None) -> str:
    """Show a value in the unit that its name ends in."""
    if value is None or isinstance(value, str):
        return value or "n/a"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.4g} TFLOP/s"
    if name.endswith("_per_s") or "_per_s_" in name:
        return format_count(value)
    if name.endswith("_ms"):
        return f"{value:.1f}"
    if name.endswith("_loss"):
        return f"{value:.4f}"
    for unit, show in (
        ("_bytes", format_bytes),
        ("_share", format_share),
        ("_s", format_seconds),
    ):
        if name.endswith(unit):
            return show(value)
    return f"{value:,.4g}"
