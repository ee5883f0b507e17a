"""``python -m benchmarks.document``: update the figures and charts of all pages.

The pages are README and docs, and the figures come from the committed files. A mark
names a figure, or a table below its head, by a key of ``benchmarks.page_figures``; the
text between a mark and its end is written here::

    <!-- = h100.now.mfu -->31.5 %<!-- end -->

    <!-- table speed.published -->

    | step | GPU | published | predicted | error |
    |---|---|---:|---:|---:|
    | ModernBERT-base, 1024 tokens | H100 80GB HBM3 | 312,336 | 365,554 | +17 % |

    <!-- end -->
"""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from autotune.base.files import write_atomically
from autotune.errors import AutotuneError, BadInput
from benchmarks import pictures
from benchmarks.gpu.page import write_page
from benchmarks.page_figures import (
    cpus,
    full_tables,
    h100,
    paper_and_faults,
    predictions,
    structure,
    targets,
)
from benchmarks.page_figures.formats import Figures, Rows
from benchmarks.page_figures.recorded import RecordedFigures, read_recorded_figures

ROOT = Path(__file__).parent.parent
SUBJECTS = (
    targets,
    h100,
    predictions,
    cpus,
    paper_and_faults,
    full_tables,
    structure,
)
_MARK = re.compile(
    r"<!-- (?P<kind>table|=) (?P<key>.+?) -->(?P<old>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)


def main() -> int:
    """Write all pages that quote figures, and the charts."""
    try:
        recorded = read_recorded_figures(ROOT)
        figures = all_figures(recorded)
        texts = {
            path: updated(str(path.relative_to(ROOT)), path.read_text(), figures)
            for path in pages(ROOT)
        }
    except AutotuneError as error:
        sys.stderr.write(f"error: {error.message}\n  next: {error.next_step}\n")
        return error.exit_code
    for path, text in texts.items():
        write_atomically(path, text)
    write_page()
    pictures.draw(ROOT, recorded)
    return 0


def pages(root: Path) -> list[Path]:
    """Return README and all pages of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def all_figures(recorded: RecordedFigures) -> Figures:
    """Return the text or the rows of every key that a mark may name."""
    figures: Figures = {}
    for subject in SUBJECTS:
        figures |= subject.figures(recorded)
    return figures


def keys_of(page: str) -> Iterator[str]:
    """Yield the key of each mark of a page."""
    return (mark["key"] for mark in _MARK.finditer(page))


def updated(name: str, page: str, figures: Mapping[str, str | Rows]) -> str:
    """Return a page with the text of each mark updated.

    Args:
        name: Path of the page, for errors.
        page: Markdown.
        figures: Text or rows of each key.

    Raises:
        BadInput: If a key is unknown, a mark has no end, or a table has another number
            of columns than its head.
    """

    def update(mark: re.Match[str]) -> str:
        key, kind, old = mark["key"], mark["kind"], mark["old"]
        opening = f"<!-- {kind} {key} -->"
        if "<!--" in old:
            raise BadInput(
                f"{name}: {opening} has no end", next_step="add: <!-- end -->"
            )
        figure = figures.get(key)
        if kind == "=" and isinstance(figure, str):
            return f"{opening}{figure}{mark['end']}"
        if kind == "table" and isinstance(figure, list):
            table = _table(f"{name}: {opening}", old, figure)
            return f"{opening}\n\n{table}\n\n{mark['end']}"
        raise _unknown(name, kind, key, figures)

    return _MARK.sub(update, page)


def _table(where: str, old: str, rows: Rows) -> str:
    """Return a table with the head that it has, and new rows."""
    head = old.strip("\n").splitlines()[:2]
    columns = head[0].count("|") - 1 if head else 0
    if any(len(row) != columns for row in rows):
        raise BadInput(
            f"{where} has a head of {columns} columns, and rows of {len(rows[0])}",
            next_step="give its head on the page a title for each column",
        )
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _unknown(
    page: str, kind: str, key: str, figures: Mapping[str, str | Rows]
) -> BadInput:
    wanted = list if kind == "table" else str
    known = [name for name, figure in figures.items() if isinstance(figure, wanted)]
    similar = difflib.get_close_matches(key, known, n=1)
    return BadInput(
        f"{page}: no {'table' if kind == 'table' else 'figure'} has the key {key!r}",
        next_step=(
            f"use {similar[0]!r}, or add the key to benchmarks/page_figures"
            if similar
            else "add the key to benchmarks/page_figures"
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
