"""Files that must survive anything, in ``profiles/`` and ``reports/``: atomic writes and the append-only ledger."""

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from trainer import files as disk
from trainer.config.tables import canonical_json, canonical_sha256

LEDGER_DIRECTORY = "ledger"
"""Within a profile's directory among the reports."""
MAX_LEDGER_BYTES = 256 * 2**20
_SHORT_CHARACTERS = 600


def json_rows(value: object) -> str:
    """Return JSON in which what is short, or holds no further tables, stands on one line: lists of rows read as rows.

    What JSON does not know becomes text.
    """
    return f"{_rows(value, '')}\n"


def _rows(value: object, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False, default=str)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if len(flat) <= _SHORT_CHARACTERS or not any(isinstance(one, dict | list | tuple) for one in inner):
        return flat
    deeper = f"{indent} "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_rows(one, deeper)}" for key, one in value.items()]
        return f"{{\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}}}"
    return f"[\n{deeper}" + f",\n{deeper}".join(_rows(one, deeper) for one in inner) + f"\n{indent}]"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new one, never a part.

    Raises:
        BadInput: If the place cannot be written; nothing is left there then.
    """
    with unwritable_means_bad_input(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write_atomically(path, text)


def check_writable(directory: Path) -> None:
    """Prove that a directory can be written, or made and written, before hours are spent; nothing is left behind.

    Raises:
        BadInput: If it cannot.
    """
    with unwritable_means_bad_input(directory):
        there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
        probe = there / f".{secrets.token_hex(4)}.writable"
        try:
            with probe.open("xb") as file:
                file.write(b"1")
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def unwritable_means_bad_input(path: Path) -> Iterator[None]:
    """Translate the operating system's refusals to write into one clear error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(
            f"cannot write {path}: {reason}", next_step="Choose another place, or free space or permissions there."
        ) from error


class Ledger:
    """An append-only list of trial records in a directory; one file per writer, merged on read.

    Each line is JSON with a checksum. A torn last line, which a crash or a full disk leaves, is ignored on read and
    never written after: ``writer`` is a name that no other has at the same time.
    """

    def __init__(self, directory: Path, writer: str) -> None:
        self.directory = directory
        self._file = directory / f"{writer}-{secrets.token_hex(4)}.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record and sync it to disk.

        Raises:
            BadInput: If the directory cannot be written.
        """
        line = canonical_json({"record": record, "sha256": canonical_sha256(record)}) + b"\n"
        with unwritable_means_bad_input(self._file):
            self.directory.mkdir(parents=True, exist_ok=True)
            disk.append_whole(self._file, line, durable=True)


def read_ledger(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Return all writers' records, ordered by their ``time_utc``, and how many lines are damaged.

    One that does not exist yet is empty.

    Raises:
        BadInput: If a file of it is too large to be one.
    """
    found: list[dict[str, Any] | None] = []
    for path in sorted(directory.glob("*.jsonl")):
        if path.stat().st_size > MAX_LEDGER_BYTES:
            raise BadInput(
                f"{path} is larger than {MAX_LEDGER_BYTES} bytes", next_step="Move it away; it is no ledger."
            )
        found += map(_checked, path.read_bytes().splitlines())
    records = [record for record in found if record is not None]
    return sorted(records, key=lambda record: str(record.get("time_utc", ""))), found.count(None)


def _checked(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        record = entry["record"]
        intact = isinstance(record, dict) and entry["sha256"] == canonical_sha256(record)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if intact else None
