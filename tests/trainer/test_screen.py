import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from trainer.progress import forgive_closed_streams
if sys.argv[1] == "forgive":
    forgive_closed_streams()
sys.stdin.readline()
for size in (1, 100_000, 1):
    for stream in (sys.stderr, sys.stdout):
        print("x" * size, file=stream)
        stream.flush()
sys.exit(9)
"""


@pytest.fixture
def ended():
    """The exit code of a program that writes after its readers are gone."""

    def run(how):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": ""},  # so that what is left in a buffer fails to be flushed, too
        )  # fmt: skip
        process.stdout.close()
        process.stderr.close()
        with process:
            process.stdin.write(b"\n")
            process.stdin.close()
        return process.returncode

    return run


def test_readers_that_are_gone_end_no_program_that_forgives_them(ended):
    assert ended("forgive") == 9
    assert ended("do not") not in (0, 9)


def test_what_is_written_arrives_as_long_as_somebody_reads():
    code = "import sys\nfrom trainer.progress import forgive_closed_streams\nforgive_closed_streams()\n"
    code += "print('out', sys.stdout.isatty())\nassert sys.stderr.write('err\\n') == 4"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("out False\n", "err\n")
