import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.base.files import check_writable, readable_json, write_atomically
from autotune.errors import BadInput
from autotune.trials.trial_log import TrialLog, read_trial_log

_ANEW = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=60,
    deadline=None,
)


def _numbers(directory) -> list[int]:
    return [record["number"] for record in read_trial_log(directory)[0]]


def _append(directory, *numbers: int, writer: str = "w") -> Path:
    """Append records by a new writer; its file."""
    trial_log = TrialLog(directory, writer)
    for number in numbers:
        trial_log.append(
            {"time_utc": f"2026-01-01T00:00:{number:02}", "number": number}
        )
    return trial_log._file


def test_records_come_back_in_the_order_of_their_times_whoever_wrote_them(tmp_path):
    assert _numbers(tmp_path / "none") == []
    _append(tmp_path, 0, 2, writer="one")
    _append(tmp_path, 1, 3, writer="other")
    assert _numbers(tmp_path) == [0, 1, 2, 3]


@_ANEW
@given(cut=st.integers(0, 400))
def test_a_torn_tail_costs_only_what_it_tore(tmp_path_factory, cut):
    path = _append(tmp_path_factory.mktemp("trial_log"), 0, 1, 2)
    raw = path.read_bytes()
    path.write_bytes(raw[: max(0, len(raw) - cut)])
    numbers = _numbers(path.parent)
    assert numbers == list(range(len(numbers)))
    # What a later writer adds is not touched by the torn line: it has a file of its
    # own.
    _append(path.parent, 9)
    assert _numbers(path.parent) == [*numbers, 9]


@_ANEW
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_never_becomes_another_record(tmp_path_factory, place, value):
    path = _append(tmp_path_factory.mktemp("trial_log"), 0)
    (record,), _ = read_trial_log(path.parent)
    raw = bytearray(path.read_bytes())
    raw[place % len(raw)] = value
    path.write_bytes(bytes(raw))
    assert read_trial_log(path.parent)[0] in ([], [record])


@pytest.mark.parametrize(
    "line",
    [b"null", b"[]", b"{}", b'{"record": 1, "sha256": "x"}', b"[" * 100_000, b"\xff"],
)
def test_lines_from_strangers_are_counted_and_left_out(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    assert read_trial_log(tmp_path) == ([], 1)


def test_a_file_is_replaced_whole_and_nothing_else_is_left_there(tmp_path):
    path = tmp_path / "deep" / "p.toml"
    check_writable(path.parent)
    assert list(tmp_path.iterdir()) == []
    for text in ("old", "new"):
        write_atomically(path, text)
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written_and_a_full_disk_are_bad_input(tmp_path):
    blocked, trial_log = tmp_path / "file", TrialLog(tmp_path, "w")
    blocked.write_text("")
    for refuse in (
        lambda: check_writable(blocked / "x"),
        lambda: write_atomically(blocked / "x", ""),
    ):
        with pytest.raises(BadInput, match="cannot write"):
            refuse()
    trial_log._file.symlink_to("/dev/full")
    with pytest.raises(BadInput, match="No space left"):
        trial_log.append({"number": 1})


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=_PLAIN)
def test_rows_of_json_are_the_same_value(value):
    assert json.loads(readable_json(value)) == value


def test_each_row_of_a_long_table_stands_on_a_line():
    rows = [{"name": f"row {number}", "figures": [number] * 100} for number in range(4)]
    lines = readable_json({"bars": [], "rows": rows}).splitlines()
    assert len(lines) == len(rows) + 5
    assert [json.loads(line.rstrip(",")) for line in lines if '"name"' in line] == rows
