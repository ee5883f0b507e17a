import gzip
import itertools
import json
import os

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from autotune.corpus.extract import extract_partition
from autotune.corpus.sources import SOURCES, base
from autotune.corpus.sources.base import (
    TOO_LONG,
    Partition,
    Reject,
    Slice,
    SourceOptions,
    UnusableFileError,
)
from autotune.corpus.workplace import Workplace

CONTENT = st.lists(
    st.sampled_from(
        [
            b"a",
            b"bc",
            b"\n",
            b"\n\n",
            b"\r\n",
            b" ",
            b"\t\n",
            "é".encode(),
            b"\xff",
            b"\0",
        ]
    ),
    max_size=40,
).map(b"".join)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.txt"


def read(path, kind, begin=0, end=None, **options):
    part = Slice(
        path=str(path), begin=begin, end=path.stat().st_size if end is None else end
    )
    return list(SOURCES[kind].samples(part, SourceOptions(**options)))


def texts(entries):
    return [entry for entry in entries if isinstance(entry, str)]


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    content=CONTENT,
    cuts=st.lists(st.integers(0, 60), max_size=4),
    unit=st.sampled_from(["line", "paragraph"]),
)
def test_slices_add_up_to_the_file(path, content, cuts, unit):
    path.write_bytes(content)
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    parts = [
        sample
        for begin, end in itertools.pairwise(edges)
        for sample in read(path, "text", begin, end, unit=unit)
    ]
    assert parts == read(path, "text", unit=unit)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=CONTENT.filter(lambda content: b"\xff" not in content))
def test_splits_lines_like_plain_definition(path, content):
    path.write_bytes(content)
    split = [line.rstrip(b"\r\n").decode() for line in content.split(b"\n")]
    assert texts(read(path, "text")) == [line for line in split if line.strip()]
    paragraphs = [[]]
    for line in split:
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    assert texts(read(path, "text", unit="paragraph")) == [
        "\n".join(lines) for lines in paragraphs if lines
    ]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_bad_utf8_rejects_only_its_sample(path, unit):
    path.write_bytes(b"good\n\nba\xffd\n\nfine\n")
    good, bad, fine = read(path, "text", unit=unit)
    assert (good, fine) == ("good", "fine")
    assert bad == Reject(
        path=str(path), where=f"{unit} at byte 6", reason="not UTF-8 at byte 8"
    )


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_overlong_sample_is_rejected(path, monkeypatch, unit):
    monkeypatch.setattr(base, "MAX_SAMPLE_BYTES", 1000)
    path.write_bytes(b"a\n\n" + b"x" * 500_000 + b"\n\nb\n")
    entries = read(path, "text", unit=unit)
    reject = Reject(
        path=str(path),
        where=f"{unit} at byte {0 if unit == 'file' else 3}",
        reason=TOO_LONG,
    )
    assert [entry for entry in entries if isinstance(entry, Reject)] == [reject]
    assert texts(entries) == ([] if unit == "file" else ["a", "b"])


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_byte_order_mark_is_no_text(tmp_path, unit):
    plain = tmp_path / "a.txt"
    plain.write_bytes("\ufeffone \ufefftwo".encode())
    assert read(plain, "text", unit=unit) == ["one \ufefftwo"]


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_reads_gzip_like_plain_text(tmp_path, unit):
    plain = tmp_path / "a.txt"
    packed = tmp_path / "a.txt.gz"
    plain.write_text("one\ntwo\n\nthree\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    samples = read(packed, "text", unit=unit)
    assert samples == read(plain, "text", unit=unit)
    assert (samples == [plain.read_text()]) == (unit == "file")


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-20],
        lambda b: b"\0" * 30 + b[30:],
        lambda b: b[:40] + b"\xff" * 9 + b[49:],
    ],
    ids=["truncated", "header", "middle"],
)
def test_damaged_gzip_is_unusable(tmp_path, damage):
    packed = tmp_path / "a.gz"
    packed.write_bytes(damage(gzip.compress(bytes(range(256)) * 40)))
    with pytest.raises(UnusableFileError):
        read(packed, "text")


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=st.lists(st.text(max_size=20), max_size=8), cut=st.integers(0, 200))
def test_reads_field_of_every_line(path, texts, cut):
    path.write_text(
        "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)
    )
    cut = min(cut, path.stat().st_size)
    assert read(path, "jsonl", end=cut) + read(path, "jsonl", begin=cut) == [
        text for text in texts if text.strip()
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"no json", "not JSON"),
        (b"[1]", "field 'text' not found; the line is list, not an object"),
        (b"{}", "field 'text' not found; fields, none of text: none"),
        (b'{"n": 5}', "field 'text' not found; fields, none of text: 'n'"),
        (
            b'{"n": 5, "body": "x", "doc": {"title": "y"}}',
            "field 'text' not found; fields of text: 'body', 'doc.title'",
        ),
        (
            b'{"a": "", "b": "", "c": "", "d": "", "e": "", "f": "", "g": ""}',
            "fields of text: 'a', 'b', 'c', 'd', 'e' and 2 more",
        ),
        (b'{"text": 5, "body": "x"}', "is int, not text; fields of text: 'body'"),
        (b'{"text": null}', "is NoneType, not text"),
        (b'{"text": "\\ud800"}', "half a character"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"text": "open', "not JSON"),
    ],
)
def test_unusable_line_is_named(path, line, reason):
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n\n{"text": "b"}\n')
    first, reject, last = read(path, "jsonl")
    assert (first, last) == ("a", "b")
    assert isinstance(reject, Reject)
    assert reject.where == "line at byte 14"
    assert reason in reject.reason


STRINGS = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


@pytest.mark.parametrize(
    "kind", [*STRINGS, pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_reads_column_over_all_row_groups(path, kind):
    texts = [f"text {number}" for number in range(3000)]
    column = pyarrow.array(texts).cast(kind)
    parquet.write_table(
        pyarrow.table({"text": column, "n": range(3000)}), path, row_group_size=700
    )
    assert read(path, "parquet") == texts


def test_null_is_rejected_by_row(path):
    parquet.write_table(
        pyarrow.table({"text": ["a", None, " ", "b"], "n": range(4)}), path
    )
    assert read(path, "parquet") == [
        "a",
        Reject(path=str(path), where="row 1", reason="null"),
        "b",
    ]


def test_unusable_column_is_named(path):
    parquet.write_table(
        pyarrow.table({"text": ["a", None, " ", "b"], "n": range(4)}), path
    )
    with pytest.raises(
        UnusableFileError, match="column 'body' not found; columns: 'text', 'n'"
    ):
        read(path, "parquet", field="body")
    with pytest.raises(
        UnusableFileError, match="is int64, not text; columns of text: 'text'"
    ):
        read(path, "parquet", field="n")


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-30], lambda b: b"", lambda b: b[:100] + os.urandom(200) + b[300:]],
    ids=["truncated", "empty", "middle"],
)
def test_damaged_parquet_file_is_one_reject(tmp_path, damage):
    good = tmp_path / "good.parquet"
    bad = tmp_path / "bad.parquet"
    parquet.write_table(
        pyarrow.table({"text": [f"some text {n}" for n in range(200)]}),
        good,
        compression="snappy",
    )
    bad.write_bytes(damage(good.read_bytes()))
    slices = tuple(
        Slice(path=str(path), begin=0, end=path.stat().st_size) for path in (bad, good)
    )
    partition = Partition(kind="parquet", slices=slices)
    result = extract_partition(
        Workplace(path=tmp_path), tmp_path, partition=partition, options=SourceOptions()
    )
    assert (result["rejected"], sum(result["samples"])) == (1, 200)
