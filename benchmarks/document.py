"""``python -m benchmarks.document``: write the figures that pages quote anew, from the committed files that hold them.

A page says with a mark what is quoted, and where it comes from. What stands between a mark and its end is written here:
``<!-- = {cli['bars'][0]['figure']:.2f} -->0.17<!-- end -->`` is a figure, and ``<!-- rows bars : | {name} | -->`` says
how each element becomes a row of the table that follows. Both are Python's f-strings over ``names_of``.
"""

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
from benchmarks import gpu
from benchmarks.structure import Sources, tracked

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "reports" / "benchmarks"
_MARK = re.compile(r"(?P<mark><!-- (?P<kind>rows|=) (?P<what>.+?) -->)(?P<old>.*?)(?P<end><!-- end -->)", re.DOTALL)


def main() -> int:
    """Write all pages that quote figures."""
    names = names_of(ROOT)
    for path in sorted((ROOT / "docs").glob("*.md")):
        write_atomically(path, quoted(path.read_text(), names))
    gpu.write_page()
    return 0


def names_of(root: Path) -> dict[str, Any]:
    """Return what marks may name: each benchmark's file, all bars, faults, a shipped profile, and how to show them."""
    figures = {path.stem: json.loads(path.read_text()) for path in sorted((root / "reports/benchmarks").glob("*.json"))}
    return {
        **figures,
        "bars": [bar for one in figures.values() for bar in one["bars"]],
        "bar": {bar["name"]: bar["figure"] for one in figures.values() for bar in one["bars"]},
        "faults": json.loads((root / "reports/faults.json").read_text()),
        "profile": tomllib.loads((root / "profiles/bert-mini-cpu.toml").read_text()),
        "fits": lambda one: (
            f"{one['micro_batch_size']:,} ({one['micro_batch_size_low']:,} to {one['micro_batch_size_high']:,})"
        ),
        "mean": statistics.fmean,
        "median": statistics.median,
        "house": lambda: Sources(tracked(root), root).house(),
        "named": _named,
        "number": _number,
        "size": format_bytes,
        "verdict": {True: "ok", False: "**short**", None: "not measured"}.get,
    }


def quoted(page: str, names: Mapping[str, Any]) -> str:
    """Return a page with what its marks say behind each of them.

    Args:
        page: Markdown.
        names: What marks may name.
    """

    def fill(found: re.Match[str]) -> str:
        if found["kind"] == "=":
            return found["mark"] + _text(found["what"], names) + found["end"]
        elements, _, template = found["what"].partition(" : ")
        head = found["old"].strip("\n").splitlines()[:2]
        rows = [_text(template, {**names, **one, "row": one}) for one in eval(elements, dict(names))]
        return "\n".join([found["mark"], "", *head, *rows, "", found["end"]])

    return _MARK.sub(fill, page)


def _text(template: str, names: Mapping[str, Any]) -> str:
    text: str = eval(f'f"""{template}"""', dict(names))
    return re.sub(r"(\d)%", r"\1 %", text)


def _named(found: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the tables in a table, each with its name."""
    return [{"name": name, **one} for name, one in found.items() if isinstance(one, dict)]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:.2%}" if unit == "share" else f"{value:.3g}{' s' if unit == 's' else ''}"


if __name__ == "__main__":
    sys.exit(main())
