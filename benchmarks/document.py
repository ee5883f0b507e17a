"""``python -m benchmarks.document``: update the figures and charts of all pages.

The pages are README and docs, and the figures come from the committed files. A mark
names the figure and its source; the text between a mark and its end is written here::

    <!-- = {cli['bars'][0]['figure']:.2f} -->0.17<!-- end -->
    <!-- rows bars : | {name} | -->

The first mark is a figure. The second says how each element becomes a row of the table
that follows. Both are f-strings over ``names_of``.
"""

import functools
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.base.units import format_bytes
from benchmarks import pictures
from benchmarks.gpu.page import write_page
from benchmarks.gpu.quotes import GpuQuotes
from benchmarks.gpu.results import CHECK_NAME

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "reports" / "benchmarks"
_MARK = re.compile(
    r"(?P<mark><!-- (?P<kind>rows|=) (?P<what>.+?) -->)(?P<old>.*?)(?P<end><!-- end"
    r" -->)",
    re.DOTALL,
)


def main() -> int:
    """Write all pages that quote figures, and the charts."""
    names = names_of(ROOT)
    for path in pages(ROOT):
        write_atomically(path, quoted(path.read_text(), names))
    write_page()
    pictures.draw(ROOT)
    return 0


def pages(root: Path) -> list[Path]:
    """Return README and all pages of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def names_of(root: Path) -> dict[str, Any]:
    """Return the names that marks may use.

    They are benchmarks, bars, faults, the GPU check, profiles, and formatters.
    """
    h100 = root / pictures.H100
    current = h100.parent / "2026-11-27"
    check, current_check = (
        json.loads((place / CHECK_NAME).read_text()) for place in (h100, current)
    )
    steps = json.loads((h100 / "steps.json").read_text())
    figures = {
        path.stem: json.loads(path.read_text())
        for path in sorted((root / "reports/benchmarks").glob("*.json"))
    }
    return {
        **figures,
        "bars": [bar for benchmark in figures.values() for bar in benchmark["bars"]],
        "bar": {
            bar["name"]: bar["figure"]
            for benchmark in figures.values()
            for bar in benchmark["bars"]
        },
        "faults": json.loads((root / "reports/faults.json").read_text()),
        "profile": tomllib.loads((root / "profiles/bert-mini-cpu.toml").read_text()),
        "steps": steps["steps"],
        "alternatives": steps["alternatives of bert-120m"],
        "h100_trials": json.loads((current / "trials.json").read_text()),
        "h100": (
            check["figures"] | {"advice": check["stages"]["advise-bert-120m"]["answer"]}
        ),
        "h100_now": current_check["figures"],
        "gpu_quotes": GpuQuotes(root / "reports/gpu"),
        "h100_profile": tomllib.loads((h100 / "profiles/bert-120m.toml").read_text()),
        "against": _against,
        "worst_error": _worst_error,
        "train_ratios": _train_ratios,
        "step_gain": functools.partial(_step_gain, figures.get("cuda_step", {})),
        "fits": lambda estimate: (
            f"{estimate['micro_batch_size']:,} ({estimate['micro_batch_size_low']:,} to"
            f" {estimate['micro_batch_size_high']:,})"
        ),
        "kept_words": {True: "yes", False: "**no**", None: "not known"},
        "mean": statistics.fmean,
        "median": statistics.median,
        "named": _named,
        "number": _number,
        "size": format_bytes,
        "verdict": {True: "ok", False: "**short**", None: "not measured"}.get,
    }


def quoted(page: str, names: Mapping[str, Any]) -> str:
    """Return a page with the text of each mark updated.

    Args:
        page: Markdown.
        names: Names that marks may use.
    """

    def fill(match: re.Match[str]) -> str:
        if match["kind"] == "=":
            return match["mark"] + _text(match["what"], names) + match["end"]
        elements, _, template = match["what"].partition(" : ")
        head = match["old"].strip("\n").splitlines()[:2]
        rows = [
            _text(template, {**names, **element, "row": element})
            for element in eval(elements, dict(names))
        ]
        return "\n".join([match["mark"], "", *head, *rows, "", match["end"]])

    return _MARK.sub(fill, page)


def _text(template: str, names: Mapping[str, Any]) -> str:
    text: str = eval(f'f"""{template}"""', dict(names))
    return re.sub(r"(\d)%", r"\1 %", text)


def _named(tables: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the tables in a table, each with its name."""
    return [
        {"name": name, **table}
        for name, table in tables.items()
        if isinstance(table, dict)
    ]


def _against(profile: Mapping[str, Any], recipe: str) -> str:
    """Return the speedup over a recipe with its 95 % interval."""
    row = next(
        row for row in profile["evidence"]["baseline"]["rows"] if row["name"] == recipe
    )
    return (
        f"{row['speedup']:.1f} \N{MULTIPLICATION SIGN} ({row['speedup_low']:.1f} to"
        f" {row['speedup_high']:.1f})"
    )


def _worst_error(rows: Iterable[Mapping[str, Any]], predicted: str, real: str) -> float:
    """Return the largest relative error of a prediction."""
    return max(abs(float(row[predicted] / row[real]) - 1) for row in rows)


def _train_ratios(settings: Mapping[str, Any], other: str) -> list[float]:
    """Return our throughput over another trainer's, for each model of the benchmark."""
    rates = [setting["tokens_per_s"] for setting in settings.values()]
    return sorted(
        statistics.median(rate["ours"]) / statistics.median(rate[other])
        for rate in rates
    )


def _step_gain(cuda_step: Mapping[str, Any], name: str) -> str:
    """Return the predicted gain in tokens/s of a variant of the step, in percent."""
    seconds = {
        variant: step["step_s"] for variant, step in cuda_step["ablation"].items()
    }
    return f"{seconds['as tuned by default'] / seconds[name] - 1:+.0%}"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        return format_bytes(round(value))
    return (
        f"{value:.2%}"
        if unit == "share"
        else f"{value:.3g}{' s' if unit == 's' else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
