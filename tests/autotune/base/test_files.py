import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.base.files import check_writable, readable_json, write_atomically
from autotune.errors import BadInput
from autotune.trials.trial_log import TrialLog, read_trial_log

_FRESH_DIRECTORIES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=60,
    deadline=None,
)


def _numbers(directory) -> list[int]:
    return [record["number"] for record in read_trial_log(directory)[0]]


def _append(directory, *numbers: int, writer: str = "w") -> Path:
    """Append records by a new writer, and return its file."""
    trial_log = TrialLog(directory, writer)
    for number in numbers:
        trial_log.append(
            {"time_utc": f"2026-01-01T00:00:{number:02}", "number": number}
        )
    return trial_log._file


def test_records_of_all_writers_are_in_time_order(tmp_path):
    assert _numbers(tmp_path / "none") == []
    _append(tmp_path, 0, 2, writer="one")
    _append(tmp_path, 1, 3, writer="other")
    assert _numbers(tmp_path) == [0, 1, 2, 3]


@_FRESH_DIRECTORIES
@given(cut=st.integers(0, 400))
def test_torn_tail_costs_only_torn_records(tmp_path_factory, cut):
    path = _append(tmp_path_factory.mktemp("trial_log"), 0, 1, 2)
    raw = path.read_bytes()
    path.write_bytes(raw[: max(0, len(raw) - cut)])
    numbers = _numbers(path.parent)
    assert numbers == list(range(len(numbers)))
    # A later writer has a file of its own, so the torn line does not touch its records.
    _append(path.parent, 9)
    assert _numbers(path.parent) == [*numbers, 9]


@_FRESH_DIRECTORIES
@given(index=st.integers(0, 10_000), value=st.integers(0, 255))
def test_changed_byte_never_makes_another_record(tmp_path_factory, index, value):
    path = _append(tmp_path_factory.mktemp("trial_log"), 0)
    (record,), _ = read_trial_log(path.parent)
    raw = bytearray(path.read_bytes())
    raw[index % len(raw)] = value
    path.write_bytes(bytes(raw))
    assert read_trial_log(path.parent)[0] in ([], [record])


@pytest.mark.parametrize(
    "line",
    [b"null", b"[]", b"{}", b'{"record": 1, "sha256": "x"}', b"[" * 100_000, b"\xff"],
)
def test_counts_foreign_lines(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    assert read_trial_log(tmp_path) == ([], 1)


def test_check_leaves_no_files(tmp_path):
    check_writable(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_replaces_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "deep" / "p.toml"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(check_writable, id="check"),
        pytest.param(lambda path: write_atomically(path, ""), id="write"),
    ],
)
def test_path_that_cannot_be_written_is_bad_input(write, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        write(blocked / "x")


def test_full_disk_is_bad_input(tmp_path):
    trial_log = TrialLog(tmp_path, "w")
    trial_log._file.symlink_to("/dev/full")
    with pytest.raises(BadInput, match="No space left"):
        trial_log.append({"number": 1})


_JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=_JSON_VALUES)
def test_readable_json_is_the_same_value(value):
    assert json.loads(readable_json(value)) == value


def test_each_row_of_long_table_has_a_line():
    rows = [{"name": f"row {number}", "figures": [number] * 100} for number in range(4)]
    lines = readable_json({"bars": [], "rows": rows}).splitlines()
    assert len(lines) == len(rows) + 5
    assert [json.loads(line.rstrip(",")) for line in lines if '"name"' in line] == rows
