import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from autotune.corpus import extract, pieces
from autotune.corpus.extract import extract_partition
from autotune.corpus.pieces import PiecePaths, digest, read_index, read_samples
from autotune.corpus.sources.base import Partition, Slice, SourceOptions
from autotune.errors import MachineLacks


def partition(kind, *paths):
    slices = tuple(Slice(path=str(path), begin=0, end=path.stat().st_size) for path in paths)
    return Partition(kind=kind, slices=slices)


def run(part, directory, most=None):
    directory.mkdir()
    return extract_partition(part, SourceOptions(), directory, most=most)


def samples(directory, result):
    found = []
    for number in range(len(result.samples)):
        paths = PiecePaths.of(directory, number)
        index = read_index(paths)
        some = list(read_samples(paths, index["bytes"] >= 0))
        assert [name.tobytes() for name in index["digest"]] == [digest(text.encode()) for text in some]
        found += some
    return found


def rejects(directory):
    return [json.loads(line) for line in (directory / "rejects").read_text().splitlines()]


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def test_files_that_cannot_be_used_cost_themselves_only(programs, tmp_path):
    names = ["garbage", "first", "truncated", "second", "script.sh", "copy-of-first"]
    result = run(partition("elf", *(programs / name for name in names)), tmp_path / "out")
    good = run(partition("elf", *(programs / name for name in ("first", "second", "copy-of-first"))), tmp_path / "good")
    assert samples(tmp_path / "out", result) == samples(tmp_path / "good", good)
    assert (result.files, result.rejected) == (3, 3)
    assert result.raw_bytes == good.raw_bytes
    assert [Path(one["path"]).name for one in rejects(tmp_path / "out")] == ["garbage", "truncated", "script.sh"]
    assert all(one["reason"] and one["where"] == "" for one in rejects(tmp_path / "out"))


def test_what_a_slice_wrote_before_it_failed_is_taken_back(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt.gz"
    good.write_text("a\nb\n")
    import gzip

    packed = gzip.compress(os.urandom(50_000).hex().encode() * 3 + b"\n" + b"line\n" * 1000)
    bad.write_bytes(packed[:-100])
    result = run(partition("text", good, bad, good), tmp_path / "out")
    assert samples(tmp_path / "out", result) == ["a", "b", "a", "b"]
    assert rejects(tmp_path / "out")[0]["path"] == str(bad)


def test_pieces_stay_small_whatever_the_file(tmp_path, monkeypatch):
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{number:0100d}\n" for number in range(1000)))
    monkeypatch.setattr(pieces, "PIECE_TEXT_BYTES", 10_000)
    (tmp_path / "out").mkdir()
    with pieces.PieceWriter(tmp_path / "out", 0) as writer:
        for number in range(1000):
            content = f"{number:0100d}".encode()
            writer.add(content, digest(content))
    assert writer.number == 9
    assert all(path.stat().st_size == 10_000 for path in (tmp_path / "out").glob("*.text"))


def test_a_bound_counts_distinct_samples_over_all_slices(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("a\nb\n")
    two.write_text("b\na\nc\nd\ne\n")
    result = run(partition("text", one, two), tmp_path / "out", most=3)
    assert samples(tmp_path / "out", result)[:5] == ["a", "b", "b", "a", "c"]
    assert len(set(samples(tmp_path / "out", result))) >= 3


def test_a_process_that_dies_costs_its_slice_only(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a\n")
    start = extract._Process.extract
    calls = []

    def killing(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            self._process.kill()
        return start(self, *arguments, **options)

    monkeypatch.setattr(extract._Process, "extract", killing)
    result = run(partition("text", text, text, text), tmp_path / "out")
    assert samples(tmp_path / "out", result) == ["a", "a"]
    assert [one["reason"] for one in rejects(tmp_path / "out")] == ["its extraction process died"]


def test_a_process_that_cannot_start_is_explained(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a\n")
    monkeypatch.setattr(extract, "_BOOT", "raise SystemExit(1)")
    with pytest.raises(MachineLacks, match="did not start"):
        run(partition("text", text), tmp_path / "one")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(MachineLacks, match="cannot start"):
        run(partition("text", text), tmp_path / "two")
