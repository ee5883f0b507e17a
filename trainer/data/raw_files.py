"""Raw files that were passed in place of a dataset: how to prepare them.

Only the first line is read, and nothing of it is trusted.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config.tables import flat_table

_FIRST_LINE_BYTES = 2**20
"""Longest first line that is read."""
_SHOWN_NAMES = 5
_SHOWN_CHARACTERS = 60
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_ELF_MAGIC = b"\x7fELF"
_ANY_FIELD = "NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How ``autotune data prepare`` reads a file."""

    source: str
    """Source, such as ``text:corpus.txt``."""
    field: str | None = None
    """Field or column with the text; None if the source has none."""
    conversion: str | None = None
    """Command to run before, which writes the file of ``source``; None if none is
    needed."""
    names: str = ""
    """Names among which ``field`` is to be chosen, as text; empty if unknown."""

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
        return f"{step} ({self.names})" if self.names else step


def preparation_of(path: Path) -> Preparation:
    """Return how to prepare a file, by its name and its first line."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".parquet":
        return Preparation(source=f"parquet:{path}", field=_ANY_FIELD)
    first_line = _first_line(path)
    if suffix in _JSON_SUFFIXES:
        return _prepare_json(path, first_line)
    if suffix in _SEPARATORS:
        return _prepare_columns(path, first_line, _SEPARATORS[suffix])
    kind = "elf" if first_line.startswith(_ELF_MAGIC) else "text"
    return Preparation(source=f"{kind}:{path}")


def list_names(names: Iterable[object]) -> str:
    """Return quoted names, of many only the first."""
    quoted = [repr(str(name)[:_SHOWN_CHARACTERS]) for name in names]
    text = ", ".join(quoted[:_SHOWN_NAMES])
    more = len(quoted) - _SHOWN_NAMES
    return f"{text} and {more} more" if more > 0 else text


def text_fields(value: object) -> list[str]:
    """Return the fields of a JSON object that hold text; dots lead into objects."""
    if not isinstance(value, dict):
        return []
    return [key for key, entry in flat_table(value).items() if isinstance(entry, str)]


def _first_line(path: Path) -> bytes:
    """Return the first line; empty if it is unreadable, compressed or too long."""
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
    if first_line.lstrip().startswith(b"["):
        lines_path = path.with_name(f"{path.stem}-lines.jsonl")
        return Preparation(
            source=f"jsonl:{lines_path}",
            field=_ANY_FIELD,
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
    names = f"text fields of its first line: {list_names(fields)}" if fields else ""
    return Preparation(source=f"jsonl:{path}", field=_ANY_FIELD, names=names)


def _prepare_columns(path: Path, first_line: bytes, separator: str) -> Preparation:
    lines_path = path.with_suffix(".jsonl")
    program = (
        "import csv, json, sys; [print(json.dumps(row)) for row in"
        f" csv.DictReader(sys.stdin, delimiter={separator!r})]"
    )
    read = "gzip -dc" if path.suffix == ".gz" else "cat"
    columns = first_line.decode(errors="replace").strip().split(separator)
    names = [column.strip('"') for column in columns]
    return Preparation(
        source=f"jsonl:{lines_path}",
        field=_ANY_FIELD,
        conversion=(
            f"{read} {shlex.quote(str(path))} | python3 -c {shlex.quote(program)}"
            f" > {shlex.quote(str(lines_path))}"
        ),
        names=f"its columns: {list_names(names)}" if first_line else "",
    )
