import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trainer.record import progress as progress_module
from trainer.record.progress import progress


@pytest.fixture
def lines_of(capsys, monkeypatch):
    """Function that returns the lines written for updates, without the title.

    Updates are pairs: the second of the update, and the progress of 100.
    """

    def run(updates, budget_s=None, **options):
        clock = SimpleNamespace(now_s=0.0)
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock.now_s)
        with progress("work", budget_s=budget_s, **options) as update:
            for second, done in updates:
                clock.now_s = second
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
            [(0, 20), (5, 20)],
            None,
            [" 20 % note", " 20 % note"],
            id="without progress",
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
    # Fast at first, then one in five seconds up to 68: 32 are left to do.
    slow = [(5 * number, 49 + number) for number in range(2, 20)]
    lines = lines_of([(0, 0), (5, 50), *slow])
    assert lines[-1] == " 68 % note, 0:02:40 left"


def test_time_left_never_rises_if_asked(lines_of):
    slower = [(0, 0), (5, 50), (15, 60), (40, 70), (45, 71)]
    assert lines_of(slower, never_rises=True) == [
        "  0 % note",
        " 50 % note, 0:00:05 left",
        " 60 % note, 0:00:05 left",
        " 70 % note, 0:00:05 left",
        " 71 % note, 0:00:05 left",
    ]


def test_says_longer_instead_of_no_time(lines_of):
    almost = [(0, 0), (5, 99.99), (10, 99.995)]
    assert lines_of(almost)[1:] == [
        "100 % note, longer than expected",
        "100 % note, longer than expected",
    ]


EXIT_CODE = 9
PROGRAM = f"""
import sys
from trainer.record.progress import ignore_closed_streams
if sys.argv[1] == "ignore":
    ignore_closed_streams()
sys.stdin.readline()
for size in (1, 100_000, 1):
    for stream in (sys.stderr, sys.stdout):
        print("x" * size, file=stream)
        stream.flush()
sys.exit({EXIT_CODE})
"""


@pytest.mark.parametrize("ignores_errors", [True, False])
def test_program_survives_closed_streams_only_if_ignored(ignores_errors):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ignore" if ignores_errors else "fail"],
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
    assert (process.returncode == EXIT_CODE) == ignores_errors
    assert process.returncode != 0
