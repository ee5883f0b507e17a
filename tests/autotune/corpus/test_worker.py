import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from autotune.corpus.elf import UnusableFileError
from autotune.corpus.worker import spool_functions


def test_a_file_is_spooled_without_its_own_duplicates(compile_c, tmp_path):
    same = "return x * 77 + x / 3; }\n"
    source = f"int a(int x) {{ {same} int b(int x) {{ {same} int main(void) {{ return a(1) + b(2); }}"
    done = spool_functions(compile_c(source, "-fno-inline", "-fno-ipa-icf"), tmp_path / "spool", None)
    lines = (tmp_path / "spool").read_text().splitlines()
    assert done.duplicates == 1
    assert done.functions == len(lines) == len(set(lines))


def test_a_bound_stops_the_reading(first_program, tmp_path):
    assert spool_functions(first_program, tmp_path / "all", None).functions > 2
    assert spool_functions(first_program, tmp_path / "two", 2).functions == 2
    assert (tmp_path / "all").read_text().startswith((tmp_path / "two").read_text())


def test_a_program_without_a_function_is_unusable(compile_c, tmp_path):
    start = "void _start(void) { __builtin_unreachable(); }"
    program = compile_c(start, "-nostdlib", "-static")
    with pytest.raises(UnusableFileError):
        spool_functions(program, tmp_path / "spool", None)


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
    request = {"path": str(endless), "spool": str(tmp_path / "spool"), "most": None}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    children = wait_for_children(process.pid)
    process.stdin.close()
    assert process.wait(10) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []
    process.stdout.close()
