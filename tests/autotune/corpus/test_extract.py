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
from autotune.corpus.extract import MAX_LISTED_REJECTS, extract_partition, extract_slices
from autotune.corpus.pieces import PiecePaths, digest
from autotune.corpus.sources.base import Partition, Slice, SourceOptions
from autotune.errors import MachineLacks


def partition(kind, *paths):
    slices = tuple(Slice(path=str(path), begin=0, end=path.stat().st_size) for path in paths)
    return Partition(kind=kind, slices=slices)


def run(part, directory, most=None):
    directory.mkdir()
    return extract_partition(part, SourceOptions(), directory, most=most)


def samples(directory, result):
    return stored(directory, len(result["samples"]))


def stored(directory, pieces):
    found = []
    for number in range(pieces):
        paths = PiecePaths(directory=directory, number=number)
        index = paths.read_index()
        some = list(paths.read_samples(index["bytes"] >= 0))
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
    assert (result["files"], result["rejected"]) == (3, 3)
    assert result["raw_bytes"] == good["raw_bytes"]
    assert [Path(one["path"]).name for one in rejects(tmp_path / "out")] == ["garbage", "truncated", "script.sh"]
    assert all(one["reason"] and one["where"] == "" for one in rejects(tmp_path / "out"))


def test_what_a_slice_wrote_before_it_failed_is_taken_back(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt.gz"
    good.write_text("a\nb\n")
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


def test_a_bound_does_not_count_what_a_bad_file_gave_before_it_failed(tmp_path):
    bad, good = tmp_path / "bad.txt.gz", tmp_path / "good.txt"
    bad.write_bytes(gzip.compress(os.urandom(50_000).hex(" ").replace(" ", "\n").encode())[:-100])
    lines = [f"line {number}" for number in range(300)]
    good.write_text("\n".join(lines))
    result = run(partition("text", bad, good), tmp_path / "out", most=300)
    assert samples(tmp_path / "out", result) == lines


def some_texts(tmp_path, count):
    paths = [tmp_path / f"{number}.txt" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}\n")
    return paths


@pytest.mark.parametrize("victim", ["process", "child"])
def test_a_process_that_is_killed_once_costs_nothing(tmp_path, monkeypatch, victim):
    start = extract._Process.extract
    calls = []

    def killing(self, request):
        calls.append(len(request["slices"]))
        if len(calls) == 2:
            if victim == "process":
                self._process.kill()
            else:
                return Unread(reason="its reader was ended by signal 9", killed=True)
        return start(self, request)

    monkeypatch.setattr(extract._Process, "extract", killing)
    monkeypatch.setattr(extract, "_TOGETHER", 2)
    result = run(partition("text", *some_texts(tmp_path, 5)), tmp_path / "out")
    assert samples(tmp_path / "out", result) == ["0", "1", "2", "3", "4"]
    assert calls == [2, 2, 2, 1]
    assert (result["files"], result["rejected"], rejects(tmp_path / "out")) == (5, 0, [])


def test_nothing_is_written_by_the_child_of_a_process_that_was_killed(tmp_path):
    # Opening a pipe that nobody writes to blocks; the child would read on once somebody does.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    request = {"kind": "text", "options": {}, "directory": str(tmp_path), "piece": 0, "most": None}
    part = {"path": str(pipe), "begin": 0, "end": 1}
    with extract._extraction_process() as process:
        reader = psutil.Process(process._process.pid)

        def kill_it_at_work():
            while not reader.children():
                time.sleep(0.01)
            reader.kill()

        killer = threading.Thread(target=kill_it_at_work)
        killer.start()
        outcome = process.extract({**request, "slices": [part]})
        killer.join()
        assert isinstance(outcome, Unread)
        assert outcome.killed
        # Nobody has it open for reading any more.
        with pytest.raises(OSError, match="No such device"):
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_what_kills_its_reader_again_and_again_costs_itself_only(tmp_path, monkeypatch):
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
    result = run(partition("text", *some_texts(tmp_path, 5)), tmp_path / "out")
    assert samples(tmp_path / "out", result) == ["0", "1", "3", "4"]
    assert rejects(tmp_path / "out") == [{"path": deadly, "where": "", "reason": "its extraction process died"}]


def test_small_files_share_a_child_and_large_ones_do_not():
    def grouped(*sizes):
        slices = [Slice(path=str(number), begin=0, end=size) for number, size in enumerate(sizes)]
        groups = list(extract._read_together(slices))
        assert [part for group in groups for part in group] == slices
        return [len(group) for group in groups]

    large = extract._TOGETHER_BYTES
    assert grouped(1) == [1]
    assert grouped(large, large, 1) == [1, 1, 1]
    assert grouped(1, large - 1, 1, 1) == [2, 2]
    assert grouped(*[0] * (2 * extract._TOGETHER + 1)) == [extract._TOGETHER, extract._TOGETHER, 1]


def test_a_file_that_is_gone_when_its_turn_comes_is_rejected(tmp_path):
    texts = some_texts(tmp_path, 3)
    part = partition("text", *texts)
    texts[1].unlink()
    result = run(part, tmp_path / "out")
    assert samples(tmp_path / "out", result) == ["0", "2"]
    assert [Path(one["path"]).name for one in rejects(tmp_path / "out")] == ["1.txt"]


def test_a_process_that_cannot_start_is_explained(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a\n")
    monkeypatch.setattr(extract, "_BOOT", "raise SystemExit(1)")
    with pytest.raises(MachineLacks, match="did not start"):
        run(partition("text", text), tmp_path / "one")
    monkeypatch.setattr(extract, "_BOOT", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(MachineLacks, match="signal 9 as it started"):
        run(partition("text", text), tmp_path / "killed")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(MachineLacks, match="cannot start"):
        run(partition("text", text), tmp_path / "two")


def request(path, directory, kind="elf", most=None):
    directory.mkdir(exist_ok=True)
    part = {"path": str(path), "begin": 0, "end": path.stat().st_size}
    return {"kind": kind, "slices": [part], "options": {}, "directory": str(directory), "piece": 0, "most": most}


def test_every_function_of_a_program_is_written_in_order(first_program, tmp_path):
    (done,) = extract_slices(request(first_program, tmp_path / "pieces"))
    assert stored(tmp_path / "pieces", 1) == list(functions(first_program))
    assert done.samples == len(stored(tmp_path / "pieces", 1))


def test_a_bound_on_distinct_samples_stops_the_reading(tmp_path):
    text = tmp_path / "text"
    text.write_text("a\na\nb\na\nc\nd\n")
    (done,) = extract_slices(request(text, tmp_path / "pieces", kind="text", most=3))
    assert stored(tmp_path / "pieces", 1) == ["a", "a", "b", "a", "c"]
    assert done.samples == 5


def test_a_program_without_a_function_is_unusable(compile_c, tmp_path):
    code = '__asm__(".globl _start; _start: .cfi_startproc; hlt; .cfi_endproc");'
    program = compile_c(code, "-nostdlib", "-static")
    (refused,) = extract_slices(request(program, tmp_path / "pieces"))
    assert refused == Unread(reason="holds no function of two or more instructions")
    assert [path.name for path in (tmp_path / "pieces").iterdir()] == ["rejects"]


def test_more_rejects_than_anyone_reads_are_counted_but_not_listed(tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("no json\n" * (MAX_LISTED_REJECTS + 50))
    (done,) = extract_slices(request(lines, tmp_path / "pieces", kind="jsonl"))
    assert done.rejected == MAX_LISTED_REJECTS + 50
    *listed, last = (tmp_path / "pieces" / "rejects").read_text().splitlines()
    assert len(listed) == MAX_LISTED_REJECTS
    assert json.loads(last)["reason"] == f"50 more between bytes 0 and {lines.stat().st_size} are not listed"


def wait_for_children(pid):
    for _ in range(100):
        if children := psutil.Process(pid).children():
            return children
        time.sleep(0.05)
    raise AssertionError("no child was started")


def test_the_process_ends_with_its_child_when_its_requests_close(tmp_path):
    # Opening a pipe that nobody writes to blocks for ever.
    endless = tmp_path / "endless"
    os.mkfifo(endless)
    process = subprocess.Popen(
        [sys.executable, "-c", extract._BOOT, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    process.stdin.write(json.dumps(request(endless, tmp_path / "pieces", kind="text")).encode() + b"\n")
    process.stdin.flush()
    children = wait_for_children(process.pid)
    process.stdin.close()
    assert process.wait(10) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []
    process.stdout.close()
