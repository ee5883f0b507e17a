import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu.check.children import ENDING_S, Programs

CHILD = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "sys.stderr.write(f'{child.pid}\\n'); sys.stderr.flush(); "
)


@pytest.fixture
def programs(tmp_path):
    made = Programs(tmp_path)
    yield made
    made.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def test_a_program_ends_by_itself_and_its_lines_are_passed_on(programs, tmp_path):
    lines, out = [], tmp_path / "out"
    code = "import sys; print('answer'); sys.stderr.write('one\\n\\ntwo\\n'); sys.exit(3)"
    ended = programs.run(["-c", code], 30, lines.append, stdout=out)
    assert (ended.exit_code, ended.cut_off, ended.tail) == (3, False, "one\ntwo")
    assert lines == ["one", "two"]
    assert out.read_text() == "answer\n"
    assert "ended with code 3" in ended.why


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise RuntimeError('CUDA error: no kernel')", "RuntimeError: CUDA error: no kernel"),
        ("import json; json.loads('')", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("import sys; sys.exit('train: a\\nerror: rank 0: full\\n  next: lower it')", "error: rank 0: full"),
        ("import sys; sys.exit('one\\nGoodbye all')", "Goodbye all"),
        ("import sys; sys.exit(1)", "nothing was said"),
    ],
)  # fmt: skip
def test_the_first_line_of_why_names_the_cause_and_the_rest_follows(programs, code, cause):
    ended = programs.run(["-c", code], 30, lambda _: None)
    first, *rest = ended.why.splitlines()
    assert first == f"it ended with code 1: {cause}"
    assert "\n".join(rest) == ended.tail


def test_the_project_is_found_from_any_directory(programs, tmp_path):
    ended = programs.run(["-c", "import benchmarks.gpu.check.results"], 30, lambda _: None, cwd=tmp_path)
    assert ended.exit_code == 0, ended.tail


@pytest.mark.parametrize("stubborn", [False, True])
def test_one_that_is_late_is_ended_in_time_with_all_that_it_started(programs, stubborn):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    lines: list[str] = []
    started_s = time.monotonic()
    limit_s = ENDING_S + 1
    ended = programs.run(["-c", f"{ignore}{CHILD} time.sleep(60)"], limit_s, lines.append)
    assert time.monotonic() - started_s < limit_s
    assert ended.cut_off
    assert gone_within(int(lines[0]), 5)


def test_what_an_ended_program_left_behind_is_ended_too(programs):
    lines: list[str] = []
    programs.run(["-c", CHILD], 30, lines.append)
    assert gone_within(int(lines[0]), 5)


def test_temporary_files_lie_where_they_are_removed_with_the_rest(programs, tmp_path):
    programs.run(["-c", "import os, tempfile; tempfile.mkdtemp(prefix='left-'); os._exit(1)"], 30, lambda _: None)
    assert list(tmp_path.glob("left-*"))


def test_closing_ends_what_runs(programs):
    lines: list[str] = []
    seen = threading.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        seen.set()

    thread = threading.Thread(target=programs.run, args=(["-c", f"{CHILD} time.sleep(60)"], 60, on_line))
    thread.start()
    assert seen.wait(20)
    programs.close()
    thread.join(10)
    assert not thread.is_alive()
    assert gone_within(int(lines[0]), 5)
