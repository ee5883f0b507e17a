import os
import subprocess
import sys

EXIT_CODE = 9
"""Exit code of the program, which differs from Python's after an error."""
PROGRAM = f"""
import sys
from trainer.record.closed_streams import ignore_closed_streams
if "ignore" in sys.argv:
    ignore_closed_streams()
sys.stdin.readline()  # returns once the readers of both streams are gone
for size in (1, 100_000, 1):  # below, above and again below the size of the buffer
    for stream in (sys.stderr, sys.stdout):
        print("x" * size, file=stream)
        stream.flush()
sys.exit({EXIT_CODE})
"""
"""Writes to both output streams; with the argument "ignore" after a call of
``ignore_closed_streams``."""


def exit_code_without_readers(*arguments):
    """Run the program, whose output streams have lost their readers."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Buffered, so that the flush at the exit fails too.
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )
    with process:
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
    return process.returncode


def test_program_survives_streams_without_readers():
    assert exit_code_without_readers("ignore") == EXIT_CODE


def test_closed_streams_end_a_program_otherwise():
    assert exit_code_without_readers() not in {0, EXIT_CODE}
