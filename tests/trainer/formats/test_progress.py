"""Lines of progress, which are written without a terminal.

A line is written at the first update, at the last one, and whenever five seconds have
passed since the line before.
"""

from types import SimpleNamespace

import pytest

from trainer.formats import progress as progress_module
from trainer.formats.progress import progress


@pytest.fixture
def lines_of(capsys, monkeypatch):
    """Function that returns the lines written for updates, without the title.

    Updates are percentages completed, by the time in seconds at which they come.
    """

    def run(percentages, **options):
        clock = SimpleNamespace(now_s=0.0)
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock.now_s)
        with progress("work", **options) as update:
            for moment_s, percentage in percentages.items():
                clock.now_s = moment_s
                update(percentage, 100, "note")
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("work: ") for line in lines]

    return run


def test_line_without_a_total_has_no_zero(capsys):
    with progress("plan") as update:
        update(0, None, "loading torch")
    assert capsys.readouterr().err == "plan: loading torch\n"


def test_writes_a_line_every_five_seconds(lines_of):
    assert lines_of({0: 0, 1: 10, 2: 20, 5: 50, 6: 60, 10: 100}) == [
        "  0 % note",
        " 50 % note, 0:00:05 left",
        "100 % note",
    ]


def test_time_left_is_unknown_without_progress(lines_of):
    assert lines_of({0: 20, 5: 20}) == [" 20 % note", " 20 % note"]


def test_time_left_never_exceeds_the_budget(lines_of):
    # At this pace, the work would take 500 s.
    assert lines_of({0: 0, 5: 1, 10: 2, 30: 3}, budget_s=20) == [
        "  0 % note, 0:00:20 left",
        "  1 % note, 0:00:15 left",
        "  2 % note, 0:00:10 left",
        "  3 % note, over the time limit; finishing the minimum",
    ]


def test_time_left_follows_the_last_minute(lines_of):
    fast_then_slow = {0: 0, 5: 50}
    for percentage in range(51, 69):
        latest_s = max(fast_then_slow)
        fast_then_slow[latest_s + 5] = percentage
    # One percent in five seconds, and 32 are left.
    assert lines_of(fast_then_slow)[-1] == " 68 % note, 0:02:40 left"


def test_time_left_may_be_kept_from_rising(lines_of):
    slower_and_slower = {0: 0, 5: 50, 15: 60, 40: 70, 45: 71}
    assert lines_of(slower_and_slower, never_rises=True) == [
        "  0 % note",
        " 50 % note, 0:00:05 left",
        " 60 % note, 0:00:05 left",
        " 70 % note, 0:00:05 left",
        " 71 % note, 0:00:05 left",
    ]


def test_says_longer_instead_of_no_time(lines_of):
    # Less than half a second is left, which would be rounded to none.
    assert lines_of({0: 0, 5: 99.99, 10: 99.995})[1:] == [
        "100 % note, longer than expected",
        "100 % note, longer than expected",
    ]
