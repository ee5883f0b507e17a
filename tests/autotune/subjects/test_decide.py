"""Words for failures of your code."""

from autotune.subjects.decide import crash_words, error_line


def test_shows_first_line_of_last_error():
    inner = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n   '
        " g()\nKeyError: 1\n\nDuring it:\n\n"
    )
    again = inner.partition("KeyError")[0]
    assert (
        error_line(f"{inner}{again}TypeError: failed:\n * one\n * two")
        == "TypeError: failed:"
    )
    assert error_line("exit code 3: gone") == "exit code 3: gone"


def test_hides_frames_of_this_project():
    stack = (
        "Traceback (most recent call last):\n  File"
        ' "/x/autotune/memory/jobs/step.py", line 1, in run\n    take()\n   '
        ' ^^^^^^\n  File "/home/me/mine.py", line 7, in step\n    1 /'
        " 0\nZeroDivisionError: division by zero"
    )
    words = crash_words(stack, " at n=4")
    assert words.startswith("failed at n=4: ZeroDivisionError: division by zero\n")
    assert "mine.py" in words
    assert "jobs/step.py" not in words


def test_names_crash_without_a_stack():
    assert (
        crash_words("exit code 0: ")
        == "ended its process (exit code 0), as os._exit or a crash in C++ does"
    )
