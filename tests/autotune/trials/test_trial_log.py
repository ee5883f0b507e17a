"""Trial logs: records of several writers, damaged files, full disks."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.trials.trial_log import TrialLog, read_trial_log

# Examples share the fixture, but each makes its own directory. Each syncs to a
# disk, which may be slow: few examples, without a deadline.
with_real_files = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=60,
    deadline=None,
)


def append(directory: Path, *numbers: int, writer: str = "w") -> None:
    """Append records by a new writer."""
    trial_log = TrialLog(directory, writer)
    for number in numbers:
        trial_log.append(
            {"time_utc": f"2026-01-01T00:00:{number:02}", "number": number}
        )


def only_file(directory: Path) -> Path:
    """Return the file of a trial log that has a single writer."""
    (file,) = directory.glob("*.jsonl")
    return file


def numbers_in(directory: Path) -> list[int]:
    records, _ = read_trial_log(directory)
    return [record["number"] for record in records]


def test_missing_log_is_empty(tmp_path):
    assert numbers_in(tmp_path / "none") == []


def test_records_of_all_writers_are_in_time_order(tmp_path):
    append(tmp_path, 0, 2, writer="one")
    append(tmp_path, 1, 3, writer="other")
    assert numbers_in(tmp_path) == [0, 1, 2, 3]


@with_real_files
@given(cut_bytes=st.integers(0, 400))
def test_torn_tail_costs_only_torn_records(tmp_path_factory, cut_bytes):
    directory = tmp_path_factory.mktemp("trial_log")
    append(directory, 0, 1, 2)
    file = only_file(directory)
    content = file.read_bytes()
    file.write_bytes(content[: max(0, len(content) - cut_bytes)])
    numbers = numbers_in(directory)
    assert numbers == list(range(len(numbers)))
    # A later writer has its own file, so the torn line does not touch its records.
    append(directory, 9)
    assert numbers_in(directory) == [*numbers, 9]


@with_real_files
@given(index=st.integers(0, 10_000), value=st.integers(0, 255))
def test_changed_byte_never_makes_another_record(tmp_path_factory, index, value):
    directory = tmp_path_factory.mktemp("trial_log")
    append(directory, 0)
    file = only_file(directory)
    (record,), _ = read_trial_log(directory)
    content = bytearray(file.read_bytes())
    content[index % len(content)] = value
    file.write_bytes(bytes(content))
    records, _ = read_trial_log(directory)
    assert records in ([], [record])


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"{}", id="no record"),
        pytest.param(b'{"record": 1, "sha256": "x"}', id="record is a number"),
        pytest.param(b"[" * 100_000, id="nested too deeply"),
        pytest.param(b"\xff", id="not text"),
    ],
)
def test_counts_foreign_lines(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    assert read_trial_log(tmp_path) == ([], 1)


def test_full_disk_is_bad_input(tmp_path):
    trial_log = TrialLog(tmp_path, "w")
    trial_log.append({"number": 0})
    file = only_file(tmp_path)
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(BadInput, match="No space left"):
        trial_log.append({"number": 1})
