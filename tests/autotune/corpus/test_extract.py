import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from autotune.corpus import extract, pieces
from autotune.corpus.bounded import Unread
from autotune.corpus.elf import functions
from autotune.corpus.extract import (
    MAX_LISTED_REJECTS,
    extract_partition,
    extract_slices,
)
from autotune.corpus.pieces import PiecePaths, digest
from autotune.corpus.sources.base import Partition, Slice, SourceOptions
from autotune.corpus.workplace import Workplace
from autotune.errors import MachineLacks


def partition(kind, *paths):
    slices = tuple(
        Slice(path=str(path), begin=0, end=path.stat().st_size) for path in paths
    )
    return Partition(kind=kind, slices=slices)


def run(part, directory, max_samples=None):
    """Extract a partition; return its receipt and all samples in its pieces."""
    directory.mkdir()
    workplace = Workplace(path=directory)
    options = SourceOptions()
    receipt = extract_partition(
        workplace, directory, partition=part, options=options, most=max_samples
    )
    samples = []
    for number in range(len(receipt["samples"])):
        paths = PiecePaths(directory=directory, number=number)
        index = paths.read_index()
        piece_samples = list(paths.read_samples(index["bytes"] >= 0))
        assert [name.tobytes() for name in index["digest"]] == [
            digest(text.encode()) for text in piece_samples
        ]
        samples += piece_samples
    return receipt, samples


def rejects(directory):
    return [
        json.loads(line) for line in (directory / "rejects").read_text().splitlines()
    ]


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def test_unusable_files_are_rejected_alone(programs, tmp_path):
    names = [
        "garbage",
        "first",
        "truncated",
        "second",
        "script.sh",
        "copy-of-first",
        "empty",
    ]
    part = partition("elf", *(programs / name for name in names))
    (programs / "empty").unlink()
    result, samples = run(part, tmp_path / "out")
    good = [programs / name for name in ("first", "second", "copy-of-first")]
    assert samples == [line for path in good for line in functions(path)]
    assert (result["files"], result["rejected"]) == (3, 4)
    assert result["raw_bytes"] == sum(path.stat().st_size for path in good)
    listed = rejects(tmp_path / "out")
    assert [Path(reject["path"]).name for reject in listed] == [
        "garbage",
        "truncated",
        "script.sh",
        "empty",
    ]
    assert all(reject["reason"] and reject["where"] == "" for reject in listed)


def test_failed_slice_leaves_no_samples(tmp_path):
    bad = tmp_path / "bad.txt.gz"
    good = tmp_path / "good.txt"
    bad.write_bytes(
        gzip.compress(os.urandom(50_000).hex(" ").replace(" ", "\n").encode())[:-100]
    )
    lines = [f"line {number}" for number in range(300)]
    good.write_text("\n".join(lines))
    assert (
        run(partition("text", bad, good), tmp_path / "out", max_samples=300)[1] == lines
    )
    assert rejects(tmp_path / "out")[0]["path"] == str(bad)


def test_pieces_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TEXT_BYTES", 10_000)
    with contextlib.closing(pieces.PieceWriter(tmp_path, 0)) as writer:
        for number in range(1000):
            writer.add(f"{number:0100d}".encode(), b"0" * 16)
    assert writer.number == 9
    assert all(path.stat().st_size == 10_000 for path in tmp_path.glob("*.text"))


def test_bound_counts_distinct_samples(tmp_path):
    first, second, third = (tmp_path / f"{number}.txt" for number in range(3))
    first.write_text("a\na\nb\n")
    second.write_text("b\na\nc\nd\ne\n")
    third.write_text("f\n" * 2**20)  # not read any more
    assert run(
        partition("text", first, second, third), tmp_path / "out", max_samples=3
    )[1] == [
        "a",
        "a",
        "b",
        "b",
        "a",
        "c",
    ]


def some_texts(tmp_path, count):
    paths = [tmp_path / f"{number}.txt" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}\n")
    return paths


@pytest.mark.parametrize("victim", ["process", "child"])
def test_process_killed_once_costs_nothing(tmp_path, monkeypatch, victim):
    start = extract._Process.extract
    calls = []

    def killing(self, request):
        calls.append(len(request["slices"]))
        if len(calls) == 2:
            if victim == "child":
                return Unread(reason="its reader was killed by signal 9", killed=True)
            self._process.kill()
        return start(self, request)

    monkeypatch.setattr(extract._Process, "extract", killing)
    monkeypatch.setattr(extract, "_TOGETHER", 2)
    result, samples = run(partition("text", *some_texts(tmp_path, 5)), tmp_path / "out")
    assert samples == ["0", "1", "2", "3", "4"]
    assert calls == [2, 2, 2, 1]
    assert (result["files"], result["rejected"], rejects(tmp_path / "out")) == (
        5,
        0,
        [],
    )


def test_killed_process_leaves_no_child_writing(tmp_path):
    # Opening a pipe without a writer blocks; the child would read on as soon as it has
    # one.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with contextlib.closing(extract._Process()) as process:
        reader = psutil.Process(process._process.pid)

        def kill_it_at_work():
            while not reader.children():
                time.sleep(0.01)
            reader.kill()

        threading.Thread(target=kill_it_at_work).start()
        outcome = process.extract(request(pipe, tmp_path, kind="text"))
        assert isinstance(outcome, Unread)
        assert outcome.killed
        # Nobody has it open for reading any more.
        with pytest.raises(OSError, match="No such device"):
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_file_that_kills_its_reader_is_rejected(tmp_path, monkeypatch):
    start = extract._Process.extract
    deadly = str(tmp_path / "2.txt")

    def killing(self, request):
        if any(part["path"] == deadly for part in request["slices"]):
            # As if it had written something before it died.
            with (Path(request["directory"]) / "0000.text").open("ab") as file:
                file.write(b"half a sample")
            self._process.kill()
        return start(self, request)

    monkeypatch.setattr(extract._Process, "extract", killing)
    assert run(partition("text", *some_texts(tmp_path, 5)), tmp_path / "out")[1] == [
        "0",
        "1",
        "3",
        "4",
    ]
    assert rejects(tmp_path / "out") == [
        {"path": deadly, "where": "", "reason": "its extraction process died"}
    ]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([1], [1]),
        ([extract._TOGETHER_BYTES, extract._TOGETHER_BYTES, 1], [1, 1, 1]),
        ([1, extract._TOGETHER_BYTES - 1, 1, 1], [2, 2]),
        ([0] * (2 * extract._TOGETHER + 1), [extract._TOGETHER, extract._TOGETHER, 1]),
    ],
    ids=["one", "two large", "small and large", "many empty"],
)
def test_small_files_share_a_child(sizes, groups):
    slices = [
        Slice(path=str(number), begin=0, end=size) for number, size in enumerate(sizes)
    ]
    together = list(extract._read_together(slices))
    assert [part for group in together for part in group] == slices
    assert [len(group) for group in together] == groups


@pytest.mark.parametrize(
    ("patched", "name", "value", "words"),
    [
        (extract, "_BOOT", "raise SystemExit(1)", "did not start"),
        (
            extract,
            "_BOOT",
            "import os; os.kill(os.getpid(), 9)",
            "signal 9 at start-up",
        ),
        (sys, "executable", "/missing", "cannot start"),
    ],
)
def test_process_that_cannot_start_is_explained(
    tmp_path, monkeypatch, patched, name, value, words
):
    monkeypatch.setattr(patched, name, value)
    with pytest.raises(MachineLacks, match=words):
        run(partition("text", *some_texts(tmp_path, 1)), tmp_path / "out")


def request(path, directory, kind="elf"):
    directory.mkdir(exist_ok=True)
    part = {"path": str(path), "begin": 0, "end": path.stat().st_size}
    return {
        "kind": kind,
        "slices": [part],
        "options": {},
        "directory": str(directory),
        "piece": 0,
        "most": None,
    }


def test_program_without_functions_is_unusable(compile_c, tmp_path):
    code = '__asm__(".globl _start; _start: .cfi_startproc; hlt; .cfi_endproc");'
    (refused,) = extract_slices(
        request(compile_c(code, "-nostdlib", "-static"), tmp_path / "pieces")
    )
    assert refused == Unread(reason="contains no function of two or more instructions")
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == ["rejects"]


def test_excess_rejects_are_only_counted(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("no json\n" * (MAX_LISTED_REJECTS + 50))
    (extracted,) = extract_slices(request(lines, tmp_path / "pieces", kind="jsonl"))
    assert extracted.rejected == MAX_LISTED_REJECTS + 50
    *listed, last = (tmp_path / "pieces" / "rejects").read_text().splitlines()
    assert len(listed) == MAX_LISTED_REJECTS
    assert (
        json.loads(last)["reason"]
        == f"50 more between bytes 0 and {lines.stat().st_size} are not listed"
    )


def test_child_ends_with_its_process(tmp_path):
    # Opening a pipe without a writer blocks for ever.
    endless = tmp_path / "endless"
    os.mkfifo(endless)
    command = [sys.executable, "-c", extract._BOOT, json.dumps(sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert json.loads(process.stdout.readline()) == {"ready": True}
    process.stdin.write(
        json.dumps(request(endless, tmp_path / "pieces", kind="text")).encode() + b"\n"
    )
    process.stdin.flush()
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.05)
    process.stdin.close()
    assert process.wait(10) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []
    process.stdout.close()
