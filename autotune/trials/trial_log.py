"""The trial log: an append-only list of trials in a directory, and which of them belong to a profile."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.files import translate_write_errors
from autotune.errors import BadInput
from autotune.profiles.values import Fingerprint
from autotune.trials.values import MadeOn, TrialRecord
from trainer import files
from trainer.config.tables import canonical_json, canonical_sha256

TRIAL_LOG_DIRECTORY = "trials"
"""Name of the trial log within a profile's directory among the reports."""
MAX_TRIAL_LOG_BYTES = 256 * 2**20


class TrialLog:
    """An append-only list of trial records in a directory.

    One file per writer, merged on read.

    Each line is JSON with a checksum. A torn last line, which a crash or a full disk
    leaves, is ignored on read and never appended to: ``writer`` is a name that no other
    process has at the same time.
    """

    def __init__(self, directory: Path, writer: str) -> None:
        self.directory = directory
        self._file = directory / f"{writer}-{secrets.token_hex(4)}.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and sync it to disk.

        Raises:
            BadInput: If the directory cannot be written.
        """
        line = (
            canonical_json({"record": record, "sha256": canonical_sha256(record)})
            + b"\n"
        )
        with translate_write_errors(self._file):
            self.directory.mkdir(parents=True, exist_ok=True)
            files.append_whole(self._file, line, durable=True)


def read_trial_log(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Return all writers' records, ordered by their ``time_utc``, and the number of corrupt lines.

    A log that does not exist yet is empty. Raise ``BadInput`` if a file of it is too
    large for a trial log.
    """
    found: list[dict[str, Any] | None] = []
    for path in sorted(directory.glob("*.jsonl")):
        if path.stat().st_size > MAX_TRIAL_LOG_BYTES:
            next_step = "Move it away: it is not a trial log."
            raise BadInput(
                f"{path} exceeds {MAX_TRIAL_LOG_BYTES} bytes", next_step=next_step
            )
        found += map(_checked, path.read_bytes().splitlines())
    records = [record for record in found if record is not None]
    return sorted(
        records, key=lambda record: str(record.get("time_utc", ""))
    ), found.count(None)


def _checked(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        record = entry["record"]
        intact = isinstance(record, dict) and entry["sha256"] == canonical_sha256(
            record
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if intact else None


def read_trial_records(directory: Path) -> tuple[list[TrialRecord], int]:
    """Return a trial log's trials of all sites and writers, oldest first, and the number of lines without one."""
    lines, corrupt = read_trial_log(directory)
    found = [TrialRecord.of(line) for line in lines]
    return [record for record in found if record is not None], corrupt + found.count(
        None
    )


def made_on(here: Fingerprint) -> MadeOn:
    """Return the facts of a site that trials record."""
    return MadeOn(**{name: getattr(here, name) for name in MadeOn.model_fields})


def report_directory(profile_path: Path, reports: Path) -> Path:
    """Return the directory of a profile's trial log and report."""
    return reports / profile_path.stem


def own_records(
    records: Sequence[TrialRecord], made_on: Fingerprint, seq_length_tokens: int | None
) -> tuple[TrialRecord, ...]:
    """Return trials of the same model, dataset, kind of device and sequence length (None takes any)."""
    # Trials of one site are of one model and one dataset; those that name neither are
    # known by their neighbours.
    others = {record.site for record in records if _is_other(record, made_on)}
    own = [
        (one, one.trial.config.get("seq_length_tokens"))
        for one in records
        if one.site not in others
    ]
    return tuple(
        one
        for one, length in own
        if seq_length_tokens is None or length in (None, seq_length_tokens)
    )


def trial_log_sha256(records: Iterable[TrialRecord]) -> str:
    """Return a hash of trials and all that the trial log records of each, independent of their order."""
    said = (record.model_dump(mode="json", exclude_unset=True) for record in records)
    return canonical_sha256(sorted(map(canonical_sha256, said)))


def _is_other(record: TrialRecord, made_on: Fingerprint) -> bool:
    where, config = record.made_on, record.trial.config
    data, model = config.get("data"), config.get("model")
    if where is not None:
        hashes: tuple[object, object] = where.model_sha256, where.dataset_hash
    else:
        settings = (
            {key: value for key, value in model.items() if key != "name"}
            if isinstance(model, dict)
            else None
        )
        dataset = data.get("dataset_hash") if isinstance(data, dict) else None
        hashes = None if settings is None else canonical_sha256(settings), dataset
    if hashes[0] not in (None, made_on.model_sha256) or hashes[1] not in (
        None,
        made_on.dataset_hash,
    ):
        return True
    if where is None or (where.gpu_name is None and made_on.gpu_name is not None):
        return False  # unknown; or a GPU's steps are replayed on a machine without one
    return where.gpu_name != made_on.gpu_name or (
        where.gpu_name is None and where.cpu_model != made_on.cpu_model
    )
