import json
import os
import subprocess
import sys
import time

import psutil

from autotune.corpus.bounded import Refused
from autotune.corpus.elf import functions
from autotune.corpus.pieces import PiecePaths, read_index, read_samples
from autotune.corpus.worker import MAX_LISTED_REJECTS, extract_slices


def request(path, directory, kind="elf", most=None):
    directory.mkdir(exist_ok=True)
    part = {"path": str(path), "begin": 0, "end": path.stat().st_size}
    return {"kind": kind, "slices": [part], "options": {}, "directory": str(directory), "piece": 0, "most": most}


def written(directory):
    paths = PiecePaths.of(directory, 0)
    return list(read_samples(paths, read_index(paths)["bytes"] > 0))


def test_every_function_of_a_program_is_written_in_order(first_program, tmp_path):
    (done,) = extract_slices(request(first_program, tmp_path / "pieces"))
    assert written(tmp_path / "pieces") == list(functions(first_program))
    assert done.samples == len(written(tmp_path / "pieces"))


def test_a_bound_on_distinct_samples_stops_the_reading(tmp_path):
    text = tmp_path / "text"
    text.write_text("a\na\nb\na\nc\nd\n")
    (done,) = extract_slices(request(text, tmp_path / "pieces", kind="text", most=3))
    assert written(tmp_path / "pieces") == ["a", "a", "b", "a", "c"]
    assert done.samples == 5


def test_a_program_without_a_function_is_unusable(compile_c, tmp_path):
    code = '__asm__(".globl _start; _start: .cfi_startproc; hlt; .cfi_endproc");'
    program = compile_c(code, "-nostdlib", "-static")
    (refused,) = extract_slices(request(program, tmp_path / "pieces"))
    assert refused == Refused(reason="holds no function of two or more instructions")
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
        [sys.executable, "-m", "autotune.corpus.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
