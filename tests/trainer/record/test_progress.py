"""Progress on something that is no terminal: few lines, with the time that is left."""

import os
import subprocess
import sys

import pytest

from trainer.record import progress as module
from trainer.record.progress import progress


@pytest.fixture
def lines_of(capsys, monkeypatch):
    """A function that gives what is written when updates of (second, done) of 100
    come."""

    def run(updates, budget_s=None):
        clock = {"now": 0.0}
        monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])
        with progress("work", budget_s=budget_s) as update:
            for clock["now"], done in updates:
                update(done, 100, "note")
        return [
            line.removeprefix("work: ") for line in capsys.readouterr().err.splitlines()
        ]

    return run


@pytest.mark.parametrize(
    ("updates", "budget_s", "told"),
    [
        (
            [(0, 0), (1, 10), (2, 20), (5, 50), (6, 60), (10, 100)],
            None,
            ["  0 % note", " 50 % note, 0:00:05 left", "100 % note"],
        ),
        ([(0, 20), (5, 20)], None, [" 20 % note"] * 2),
        (
            [(0, 0), (5, 1), (10, 2), (30, 3)],
            20,
            [
                "  0 % note, 0:00:20 left",
                "  1 % note, 0:00:15 left",
                "  2 % note, 0:00:10 left",
                "  3 % note, over the time limit; finishing the minimum",
            ],
        ),
    ],
    ids=[
        "every few seconds and at the end",
        "no time left while nothing moves",
        "never longer than the budget",
    ],
)
def test_a_line_is_written_now_and_then(lines_of, updates, budget_s, told):
    assert lines_of(updates, budget_s) == told


def test_the_time_left_follows_the_rate_of_the_last_minute(lines_of):
    fast_then_slow = [
        (0, 0),
        (5, 50),
        *((5 * step, 49 + step) for step in range(2, 20)),
    ]
    # One in five seconds, and 32 to go.
    assert lines_of(fast_then_slow)[-1] == " 68 % note, 0:02:40 left"


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
def test_readers_that_are_gone_end_no_program_that_forgives_them(how):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # So that what is left in a buffer fails to be flushed, too.
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    process.stderr.close()
    with process:
        process.stdin.write(b"\n")
        process.stdin.close()
    assert (process.returncode == 9) == (how == "forgive")
    assert process.returncode != 0
