"""Reports of made-up tunings, taken apart again."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

from autotune.base.document import Document, Section, SideBySide
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.values import ReportedRun
from testbed.examples.checkpoints import exit_of, header_of
from testbed.examples.profiles import example_profile
from testbed.examples.run_rows import row_of
from trainer.formats.run_record import Run


def reported(path="profiles/m.toml", profile=None, **changes):
    values = {"intact": True, "content_sha256": "c", "trials": (), "corrupt_lines": 0}
    return ReportedProfile(
        path=Path(path), profile=profile or example_profile(), **values | changes
    )


STEPS = (row_of(1), row_of(2))


def reported_run(events=(), steps=STEPS, profile_path=None, name="run", **changes):
    run = Run(
        directory=Path("runs") / name,
        header=header_of(**changes),
        steps=tuple(steps),
        evaluations=(),
        events=tuple(events),
        startup=None,
        end=exit_of(),
    )
    matched = None if profile_path is None else "the profile's hash"
    return ReportedRun(run=run, profile_path=profile_path, matched_by=matched)


def blocks_of(whole):
    """Yield every block in reading order, sections and groups before their contents."""
    for block in whole.sections if isinstance(whole, Document) else whole.blocks:
        yield block
        if isinstance(block, Section | SideBySide):
            yield from blocks_of(block)


def of_kind(whole, kind):
    """Return all blocks of a kind, of a document or of a sequence of blocks."""
    section = (
        Section(title="", key="", blocks=whole) if isinstance(whole, tuple) else whole
    )
    return [block for block in blocks_of(section) if isinstance(block, kind)]


class Page(HTMLParser):
    """The tags, attributes, tables and words of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags = []
        self.attributes = []
        self.tables = []
        self.words = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in {"td", "th"}:
            self._in_cell = False

    def handle_data(self, data):
        self.words.append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return "".join(self.words)

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]


def markdown_tables(text):
    """Return every table as rows of cells, with entities decoded."""
    tables = []
    open_table = None
    for line in text.splitlines():
        if not line.startswith("| "):
            open_table = None
            continue
        if open_table is None:
            open_table = []
            tables.append(open_table)
        cells = [
            html.unescape(cell)
            for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")
        ]
        if not all(re.fullmatch("-+:?", cell) for cell in cells):
            open_table.append(cells)
    return tables
