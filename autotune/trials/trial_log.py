"""The trial log of a profile: an append-only list of trials in a directory."""

import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.base.files import translate_write_errors
from autotune.errors import BadInput
from autotune.trials.values import TrialRecord
from trainer.formats import files
from trainer.formats.canonical_json import canonical_json, canonical_sha256
from trainer.formats.errors import unreadable

TRIAL_LOG_DIRECTORY = "trials"
"""Name of the trial log within a profile's directory among the reports."""
MAX_TRIAL_LOG_BYTES = 256 * 2**20
"""Largest file of a trial log that is read."""


class TrialLog:
    """An append-only list of trial records, as one of its writers sees it.

    The directory has a file for each writer; reading merges them. Each line is JSON
    with a checksum. A crash or a full disk may leave a torn last line. It is ignored on
    read, and no other line is appended to it, because each writer begins a new file.
    """

    def __init__(self, directory: Path, writer: str) -> None:
        """Choose a file for this writer, which the first record creates.

        Args:
            directory: Directory of the trial log; it need not exist.
            writer: Name that no other process has at the same time.
        """
        self.directory = directory
        self._file = directory / f"{writer}-{secrets.token_hex(4)}.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and sync it to disk.

        Raises:
            BadInput: If the directory cannot be written.
        """
        entry = {"record": record, "sha256": canonical_sha256(record)}
        line = canonical_json(entry) + b"\n"
        with translate_write_errors(self._file):
            self.directory.mkdir(parents=True, exist_ok=True)
            files.append_whole(self._file, line, durable=True)


def read_trial_log(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the records of all writers, as JSON.

    A trial log that does not exist yet is empty.

    Returns:
        The records, ordered by their ``time_utc``, and the number of corrupt lines.

    Raises:
        BadInput: If a file is too large for a trial log, or is a directory.
        UnreadableFile: If you may not read a file, or its disk fails.
    """
    records: list[dict[str, Any]] = []
    corrupt_lines = 0
    for path in sorted(directory.glob("*.jsonl")):
        for line in _read_bytes(path).splitlines():
            record = _intact_record(line)
            if record is None:
                corrupt_lines += 1
            else:
                records.append(record)
    records.sort(key=lambda record: str(record.get("time_utc", "")))
    return records, corrupt_lines


def _read_bytes(path: Path) -> bytes:
    """Return the content of a trial log's file.

    Raises:
        BadInput: If the file is too large, or is a directory.
        UnreadableFile: If you may not read the file, or its disk fails.
    """
    try:
        if path.stat().st_size > MAX_TRIAL_LOG_BYTES:
            raise BadInput(
                f"{path} exceeds {MAX_TRIAL_LOG_BYTES} bytes",
                next_step="Move it away: it is not a trial log.",
            )
        return path.read_bytes()
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadInput(
            f"cannot read {path}: {error.strerror}",
            next_step="Move it away: it is not a trial log.",
        ) from error


def _intact_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if it does not match its checksum."""
    try:
        entry = json.loads(line)
        record = entry["record"]
        is_intact = entry["sha256"] == canonical_sha256(record)
    except (ValueError, KeyError, TypeError, RecursionError):
        # Any bytes may stand in a corrupt line, such as a list or a torn number.
        return None
    return record if is_intact and isinstance(record, dict) else None


def read_trial_records(directory: Path) -> tuple[list[TrialRecord], int]:
    """Read the trials in a trial log, those of all sites and writers.

    Returns:
        The trials, oldest first, and the number of lines that hold no trial as this
        version of the project writes it, corrupt lines included.

    Raises:
        BadInput: As ``read_trial_log`` does.
        UnreadableFile: As ``read_trial_log`` does.
    """
    raw_records, corrupt_lines = read_trial_log(directory)
    records = [TrialRecord.of(raw_record) for raw_record in raw_records]
    trial_records = [record for record in records if record is not None]
    foreign_records = len(records) - len(trial_records)
    lines_without_trial = corrupt_lines + foreign_records
    return trial_records, lines_without_trial


def report_directory(profile_path: Path, reports: Path) -> Path:
    """Return the directory of a profile's trial log and report."""
    return reports / profile_path.stem


def trial_log_sha256(records: Iterable[TrialRecord]) -> str:
    """Return a hash of trials with all fields of their records, in any order."""
    hashes = [
        canonical_sha256(record.model_dump(mode="json", exclude_unset=True))
        for record in records
    ]
    return canonical_sha256(sorted(hashes))
