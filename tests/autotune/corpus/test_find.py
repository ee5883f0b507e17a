import gzip
import os
from pathlib import Path

import pytest

from autotune.corpus import sources as module
from autotune.corpus.sources import (
    PARTITION_BYTES,
    SOURCES,
    find_files,
    open_source,
    partitions,
)
from autotune.corpus.sources.base import SLICE_BYTES, SourceOptions
from autotune.errors import BadInput


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + path.name.encode())


def find(spec):
    return find_files(*open_source(spec))


def names(findings):
    return [file.path.name for file in findings.files]


def test_finds_files_of_directory_file_or_glob(tmp_path):
    program(tmp_path / "a")
    program(tmp_path / "below" / "deep" / "b")
    (tmp_path / "text").write_text("hello")
    findings = find(f"elf:{tmp_path}")
    assert (
        sorted(names(findings)),
        findings.other_files,
        findings.files[0].size_bytes,
    ) == (
        ["a", "b"],
        1,
        5,
    )
    assert names(find(f"elf:{tmp_path / 'a'}")) == ["a"]
    assert sorted(names(find(f"elf:{tmp_path}/below/*/?"))) == ["b"]


def test_reads_linked_file_once(tmp_path):
    program(tmp_path / "z-real")
    os.link(tmp_path / "z-real", tmp_path / "z-second")
    (tmp_path / "a-link").symlink_to("z-real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    findings = find(f"elf:{tmp_path}")
    assert (names(findings), findings.other_files, findings.unreadable) == (
        ["z-real"],
        0,
        (),
    )


def test_order_depends_only_on_names(tmp_path):
    many = [f"program-{number}" for number in range(20)]
    for directory, order in (("first", many), ("second", reversed(many))):
        for name in order:
            program(tmp_path / directory / name)
    order_in_first = names(find(f"elf:{tmp_path / 'first'}"))
    assert order_in_first == names(find(f"elf:{tmp_path / 'second'}"))
    assert order_in_first != sorted(order_in_first)


def test_counts_files_while_finding(tmp_path, monkeypatch):
    for number in range(20):
        program(tmp_path / f"program-{number}")
    monkeypatch.setattr(module, "_REPORTED_FILES", 8)
    reports = []
    find_files(
        *open_source(f"elf:{tmp_path}"),
        lambda done_files, total, note: reports.append((done_files, total, note)),
    )
    assert reports == [(8, 20, "8 of 20 files"), (16, 20, "16 of 20 files")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_listed(tmp_path):
    program(tmp_path / "a")
    program(tmp_path / "closed")
    (tmp_path / "closed").chmod(0)
    assert [Path(item.path).name for item in find(f"elf:{tmp_path}").unreadable] == [
        "closed"
    ]


@pytest.mark.parametrize(
    ("source", "message", "next_step"),
    [
        ("elfs:/usr/bin", "'elfs'", "elf:/usr/bin"),
        ("zip:/data", "'zip'", "Source types: elf:, text:, jsonl:, parquet:"),
        ("/usr/bin", "has no source type", "Source types: elf:, text:"),
        ("my.jsonl", "has no source type", "Did you mean jsonl:my.jsonl?"),
        ("my.json", "has no source type", "Did you mean jsonl:my.json?"),
        ("my.ndjson.gz", "has no source type", "Did you mean jsonl:my.ndjson.gz?"),
        ("my.parquet", "has no source type", "Did you mean parquet:my.parquet?"),
        ("my.csv", "has no source type", "cat my.csv | python3 -c"),
        ("logs/*.log", "has no source type", "Did you mean text:logs/*.log?"),
        ("elf:", "no path", "elf:/usr/bin"),
        ("elf:/no/such/place", "/no/such/place", "path"),
        ("elf:/no/such/*", "no file matches", "pattern"),
        ("elf:{}/empty", "contains no files", ""),
        ("elf:{}", "none of the 1 files", ""),
        ("text:{}/corpu.txt", "not found", "Did you mean text:{}/corpus.txt?"),
        ("text:{}/nowhere/corpus.txt", "not found", "Check the path."),
    ],
)
def test_invalid_source_suggests_what_to_write(tmp_path, source, message, next_step):
    (tmp_path / "empty").mkdir()
    (tmp_path / "corpus.txt").write_text("a line\n")
    with pytest.raises(BadInput) as error:
        find(source.format(tmp_path))
    assert message in error.value.message
    assert next_step.format(tmp_path) in error.value.next_step


def test_each_kind_takes_its_own_files(tmp_path):
    for name in ("a.jsonl", "b.ndjson.gz", "c.parquet", "d.txt", ".hidden", "e.md"):
        (tmp_path / name).write_text("x")
    assert sorted(names(find(f"jsonl:{tmp_path}"))) == ["a.jsonl", "b.ndjson.gz"]
    assert names(find(f"parquet:{tmp_path}")) == ["c.parquet"]
    assert sorted(names(find(f"text:{tmp_path}"))) == [
        "a.jsonl",
        "b.ndjson.gz",
        "c.parquet",
        "d.txt",
        "e.md",
    ]
    assert names(find(f"text:{tmp_path / '.hidden'}")) == [".hidden"]
    assert names(find(f"jsonl:{tmp_path / 'd.txt'}")) == ["d.txt"]


def test_small_files_share_a_partition(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("small\n")
    for name, size_bytes in (
        ("large.txt", 3 * SLICE_BYTES + 7),
        ("large.gz", 2 * SLICE_BYTES),
    ):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size_bytes)
    files = find(f"text:{tmp_path}").files
    parts = partitions(SOURCES["text"], files, SourceOptions())
    assert sum(part.raw_bytes for part in parts) == sum(
        file.size_bytes for file in files
    )
    expected = [
        str(file.path)
        for file in files
        for _ in range(4 if file.path.name == "large.txt" else 1)
    ]
    assert [part_slice.path for part in parts for part_slice in part.slices] == expected
    assert all(part.raw_bytes >= PARTITION_BYTES * 0.7 for part in parts[:-1])
    as_one_sample = partitions(SOURCES["text"], files, SourceOptions(unit="file"))
    assert len(
        [part_slice for part in as_one_sample for part_slice in part.slices]
    ) == len(files)


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        (b"\x7fELF\x02\x01\x01\0", False),
        (b"\xcb\r\r\n" + b"\0" * 12 + b"module", False),
        ("text in UTF-16".encode("utf-16"), False),
        (bytes(range(128, 256)) * 40, False),
        ("übermäßig, in Latin-1: ÄÖÜ".encode("latin-1"), True),
        ("текст".encode() * 4000, True),
        (b"", True),
        (gzip.compress(b"a line\n" * 9000, mtime=0), True),
        (gzip.compress(b"a line\n" * 9000, mtime=0)[:20], True),
        (gzip.compress(b"\x7fELF\0\0\0", mtime=0), False),
    ],
)
def test_binary_file_is_no_text(tmp_path, content, is_text):
    path = tmp_path / ("file.gz" if content.startswith(b"\x1f\x8b") else "file")
    path.write_bytes(content)
    (tmp_path / "beside.txt").write_text("a line\n")
    findings = find(f"text:{tmp_path}")
    assert (findings.other_files, path.name in names(findings)) == (
        not is_text,
        is_text,
    )
    if not is_text:
        with pytest.raises(BadInput, match="is a text file"):
            find(f"text:{path}")
