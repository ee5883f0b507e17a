"""The trial log: an append-only list of trials, and which of them a profile owns."""

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
from trainer.config.canonical_json import canonical_json, canonical_sha256
from trainer.errors import unreadable

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
    """Read the records of all writers.

    A trial log that does not exist yet is empty.

    Returns:
        The records, ordered by their ``time_utc``, and the number of corrupt lines.

    Raises:
        BadInput: If a file is too large for a trial log.
        UnreadableFile: If one cannot be read.
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
        BadInput: If the file is too large, or is not one that can be read.
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
        is_intact = isinstance(record, dict) and entry["sha256"] == canonical_sha256(
            record
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if is_intact else None


def read_trial_records(directory: Path) -> tuple[list[TrialRecord], int]:
    """Read the trials in a trial log, those of all sites and writers.

    Returns:
        The trials, oldest first, and the number of lines without a trial of this
        version of the project.
    """
    raw_records, corrupt_lines = read_trial_log(directory)
    records = [TrialRecord.of(raw_record) for raw_record in raw_records]
    trial_records = [record for record in records if record is not None]
    foreign_records = len(records) - len(trial_records)
    lines_without_trial = corrupt_lines + foreign_records
    return trial_records, lines_without_trial


def made_on(fingerprint: Fingerprint, load_average_1min: float | None = None) -> MadeOn:
    """Return the facts of a site that trials record.

    Args:
        fingerprint: Machine, software, model and dataset.
        load_average_1min: Load average of the host before the trials.
    """
    facts = {
        name: getattr(fingerprint, name)
        for name in MadeOn.model_fields.keys() & Fingerprint.model_fields.keys()
    }
    return MadeOn(**facts, load_average_1min=load_average_1min)


def report_directory(profile_path: Path, reports: Path) -> Path:
    """Return the directory of a profile's trial log and report."""
    return reports / profile_path.stem


def own_records(
    records: Sequence[TrialRecord],
    fingerprint: Fingerprint,
    seq_length_tokens: int | None,
) -> tuple[TrialRecord, ...]:
    """Return the trials in a profile's trial log that belong to the profile.

    Another profile of the same name may have written the others.

    Args:
        records: Trials in the trial log.
        fingerprint: Model, dataset and kind of device of the profile.
        seq_length_tokens: Sequence length of the profile; None accepts any length.
    """
    # All trials of a site are of one model and one dataset. If one of them is of
    # another profile, so are those that name neither.
    other_sites = {record.site for record in records if _is_other(record, fingerprint)}
    own = []
    for record in records:
        # None for a trial without sequences, such as one of links.
        length_tokens = record.trial.config.get("seq_length_tokens")
        accepts_any_length = seq_length_tokens is None or length_tokens is None
        has_length = accepts_any_length or length_tokens == seq_length_tokens
        if record.site not in other_sites and has_length:
            own.append(record)
    return tuple(own)


def trial_log_sha256(records: Iterable[TrialRecord]) -> str:
    """Return a hash of trials and all that the trial log records of each.

    It is independent of their order.
    """
    hashes = [
        canonical_sha256(record.model_dump(mode="json", exclude_unset=True))
        for record in records
    ]
    return canonical_sha256(sorted(hashes))


def _is_other(record: TrialRecord, fingerprint: Fingerprint) -> bool:
    """Return whether a trial is known to be of another model, dataset or device."""
    origin = record.made_on
    if origin is None:
        # An older trial log has no origins, so the device is unknown.
        model_sha256 = _model_hash_by_config(record)
        dataset_hash = _dataset_hash_by_config(record)
        has_model = model_sha256 in (None, fingerprint.model_sha256)
        has_dataset = dataset_hash in (None, fingerprint.dataset_hash)
        return not (has_model and has_dataset)
    if origin.model_sha256 != fingerprint.model_sha256:
        return True
    if origin.dataset_hash != fingerprint.dataset_hash:
        return True
    if origin.gpu_name is None and fingerprint.gpu_name is not None:
        # Data loading for a GPU may be measured on a machine without one, which replays
        # the GPU's steps.
        return False
    if origin.gpu_name != fingerprint.gpu_name:
        return True
    return origin.gpu_name is None and origin.cpu_model != fingerprint.cpu_model


def _model_hash_by_config(record: TrialRecord) -> str | None:
    """Return the hash of the model in a trial's settings; None if they have none.

    It is that of ``Fingerprint.model_sha256``, which the model's name does not change.
    """
    model = record.trial.config.get("model")
    if not isinstance(model, dict):
        return None
    return canonical_sha256(
        {name: value for name, value in model.items() if name != "name"}
    )


def _dataset_hash_by_config(record: TrialRecord) -> object:
    """Return the hash of the dataset in a trial's settings; None if they have none."""
    data = record.trial.config.get("data")
    return data.get("dataset_hash") if isinstance(data, dict) else None
