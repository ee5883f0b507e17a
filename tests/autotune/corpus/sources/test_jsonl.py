import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.sources.base import Reject, Slice, SourceOptions
from autotune.corpus.sources.jsonl import JsonlSource


def read(path, field="text", begin=0, end=None):
    part = Slice(path=str(path), begin=begin, end=path.stat().st_size if end is None else end)
    return list(JsonlSource().samples(part, SourceOptions(field=field)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=20), max_size=8), cut=st.integers(0, 200))
def test_the_field_of_every_line_is_read_wherever_the_file_is_cut(tmp_path, texts, cut):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts))
    cut = min(cut, path.stat().st_size)
    assert read(path, end=cut) + read(path, begin=cut) == [text for text in texts if text.strip()]


def test_dots_lead_into_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"doc": {"body": "hello"}}\n')
    assert read(path, "doc.body") == ["hello"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"no json", "not JSON"),
        (b"[1]", "has no field 'text'"),
        (b'{"body": "x"}', "has no field 'text'"),
        (b'{"text": 5}', "is int, not text"),
        (b'{"text": null}', "is NoneType, not text"),
        (b'{"text": "\\ud800"}', "half a character"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"text": "open', "not JSON"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_place(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n\n{"text": "b"}\n')
    first, reject, last = read(path)
    assert (first, last) == ("a", "b")
    assert isinstance(reject, Reject)
    assert reject.where == "line at byte 14"
    assert reason in reject.reason
