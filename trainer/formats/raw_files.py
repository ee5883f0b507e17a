"""Commands that prepare a raw file which was passed in place of a dataset.

Only the file's first line is read. Its text is quoted and shortened before it is shown,
as it may be from a stranger.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.formats.nested_tables import flatten_table

_FIRST_LINE_BYTES = 2**20
"""Longest first line that is read."""
_MAX_SHOWN_NAMES = 5
"""Names of fields that a message lists."""
_MAX_SHOWN_CHARACTERS = 60
"""Characters of each name that a message shows."""
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separator of columns, by suffix of the file."""
_ELF_MAGIC = b"\x7fELF"
"""First bytes of a program or library."""
_FIELD_PLACEHOLDER = "NAME"
"""Name shown for a field that you have to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Arguments of ``autotune data prepare`` for a raw file."""

    source: str
    """Kind and path of the source, such as ``text:corpus.txt``."""
    field: str | None = None
    """Field or column with the text; None if this kind of source has no fields."""
    conversion: str | None = None
    """Shell command to run before, which writes the file of ``source``; None if
    ``source`` is the raw file."""
    field_choices: str = ""
    """Sentence part that lists the fields among which you choose; empty if none are
    known, or if there is no choice."""

    def next_step(self) -> str:
        """Return the commands that prepare the file, as the next step of an error."""
        command = f"autotune data prepare {shlex.quote(self.source)}"
        if self.field is not None:
            command += f" --field {shlex.quote(self.field)}"
        step = f"Prepare it first: {command} --out DIR"
        if self.conversion is not None:
            step = (
                f"Write it as JSON lines: {self.conversion}; then: {command} --out DIR"
            )
        if self.field_choices:
            step += f" ({self.field_choices})"
        return step


def preparation_of(path: Path) -> Preparation:
    """Return the preparation of a file, derived from its name and its first line."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".parquet":
        return Preparation(source=f"parquet:{path}", field=_FIELD_PLACEHOLDER)
    first_line = _first_line(path)
    if suffix in _JSON_SUFFIXES:
        return _prepare_json(path, first_line)
    if suffix in _SEPARATORS:
        return _prepare_columns(path, first_line, _SEPARATORS[suffix])
    kind = "elf" if first_line.startswith(_ELF_MAGIC) else "text"
    return Preparation(source=f"{kind}:{path}")


def list_names(names: Iterable[object]) -> str:
    """Return names for a message: quoted, shortened, and only the first if many."""
    quoted = [repr(str(name)[:_MAX_SHOWN_CHARACTERS]) for name in names]
    text = ", ".join(quoted[:_MAX_SHOWN_NAMES])
    hidden_names = len(quoted) - _MAX_SHOWN_NAMES
    return f"{text} and {hidden_names} more" if hidden_names > 0 else text


def text_fields(value: object) -> list[str]:
    """Return the names of the fields of a JSON value that hold text.

    A field of a nested object is named as in ``doc.body``. There are none if the value
    is no object.
    """
    if not isinstance(value, dict):
        return []
    return [
        key for key, entry in flatten_table(value).items() if isinstance(entry, str)
    ]


def _first_line(path: Path) -> bytes:
    """Return the first line, or nothing if it is unreadable, compressed or too long."""
    # A pipe, which has no end, is not opened.
    if path.suffix == ".gz" or not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            line = file.readline(_FIRST_LINE_BYTES)
    except OSError:
        return b""
    return line if len(line) < _FIRST_LINE_BYTES else b""


def _prepare_json(path: Path, first_line: bytes) -> Preparation:
    """Return the preparation of a file of JSON lines, or of one JSON array."""
    if first_line.lstrip().startswith(b"["):
        lines_path = path.with_name(f"{path.stem}-lines.jsonl")
        return Preparation(
            source=f"jsonl:{lines_path}",
            field=_FIELD_PLACEHOLDER,
            conversion=(
                f"jq -c '.[]' {shlex.quote(str(path))} > {shlex.quote(str(lines_path))}"
            ),
        )
    try:
        fields = text_fields(json.loads(first_line))
    except (ValueError, RecursionError):
        fields = []
    if len(fields) == 1:
        return Preparation(source=f"jsonl:{path}", field=fields[0])
    field_choices = ""
    if fields:
        field_choices = f"text fields of its first line: {list_names(fields)}"
    return Preparation(
        source=f"jsonl:{path}", field=_FIELD_PLACEHOLDER, field_choices=field_choices
    )


def _prepare_columns(path: Path, first_line: bytes, separator: str) -> Preparation:
    """Return the preparation of a table, whose rows are first written as JSON lines."""
    lines_path = path.with_suffix(".jsonl")
    rows_to_lines = (
        "import csv, json, sys; [print(json.dumps(row)) for row in"
        f" csv.DictReader(sys.stdin, delimiter={separator!r})]"
    )
    read_command = "gzip -dc" if path.suffix == ".gz" else "cat"
    field_choices = ""
    if first_line:
        # The header of the table. Names that contain the separator are shown in parts.
        columns = first_line.decode(errors="replace").strip().split(separator)
        names = [column.strip('"') for column in columns]
        field_choices = f"its columns: {list_names(names)}"
    return Preparation(
        source=f"jsonl:{lines_path}",
        field=_FIELD_PLACEHOLDER,
        conversion=(
            f"{read_command} {shlex.quote(str(path))}"
            f" | python3 -c {shlex.quote(rows_to_lines)}"
            f" > {shlex.quote(str(lines_path))}"
        ),
        field_choices=field_choices,
    )
