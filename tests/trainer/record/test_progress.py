import os
import subprocess
import sys

import pytest

from trainer.record import progress as module
from trainer.record.progress import progress


@pytest.fixture
def lines_of(capsys, monkeypatch):
    """Function that returns the lines written for updates of (second, done) of 100."""

    def run(updates, budget_s=None):
        clock = {"now": 0.0}
        monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])
        with progress("work", budget_s=budget_s) as update:
            for second, done in updates:
                clock["now"] = second
                update(done, 100, "note")
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("work: ") for line in lines]

    return run


def test_line_without_a_total_has_no_zero(capsys):
    with progress("plan") as update:
        update(0, None, "loading torch")
    assert capsys.readouterr().err == "plan: loading torch\n"


@pytest.mark.parametrize(
    ("updates", "budget_s", "expected"),
    [
        pytest.param(
            [(0, 0), (1, 10), (2, 20), (5, 50), (6, 60), (10, 100)],
            None,
            ["  0 % note", " 50 % note, 0:00:05 left", "100 % note"],
            id="every few seconds",
        ),
        pytest.param(
            [(0, 20), (5, 20)], None, [" 20 % note"] * 2, id="without progress"
        ),
        pytest.param(
            [(0, 0), (5, 1), (10, 2), (30, 3)],
            20,
            [
                "  0 % note, 0:00:20 left",
                "  1 % note, 0:00:15 left",
                "  2 % note, 0:00:10 left",
                "  3 % note, over the time limit; finishing the minimum",
            ],
            id="never longer than the budget",
        ),
    ],
)
def test_writes_lines_without_a_terminal(lines_of, updates, budget_s, expected):
    assert lines_of(updates, budget_s) == expected


def test_time_left_follows_the_last_minute(lines_of):
    slow = [(5 * step, 49 + step) for step in range(2, 20)]
    lines = lines_of([(0, 0), (5, 50), *slow])
    # One in five seconds, and 32 to go.
    assert lines[-1] == " 68 % note, 0:02:40 left"


PROGRAM = """
import sys
from trainer.record.progress import ignore_closed_streams
if sys.argv[1] == "forgive":
    ignore_closed_streams()
sys.stdin.readline()
for size in (1, 100_000, 1):
    for stream in (sys.stderr, sys.stdout):
        print("x" * size, file=stream)
        stream.flush()
sys.exit(9)
"""


@pytest.mark.parametrize("how", ["forgive", "do not"])
def test_program_survives_closed_streams_only_if_ignored(how):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Buffered, so that the flush at the exit fails too.
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    process.stderr.close()
    with process:
        process.stdin.write(b"\n")
        process.stdin.close()
    assert (process.returncode == 9) == (how == "forgive")
    assert process.returncode != 0
