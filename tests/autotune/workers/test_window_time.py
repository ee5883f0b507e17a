"""Least time of the windows of a sweep."""

import pytest

from autotune.trials.decide.least_time import sweep_time_text
from autotune.workers.decide.window_time import least_window_s, longer_words


def text_of(step_s, limit_s=600.0):
    return sweep_time_text(
        "workers",
        "cpu",
        least_window_s(4.0, step_s, "cpu"),
        limit_s,
        remark=longer_words(4.0, step_s),
    )


def test_window_of_short_steps_has_its_duration_and_warm_up():
    assert least_window_s(4.0, 0.1, "cpu") == pytest.approx(4.2)


def test_window_of_slow_steps_has_enough_of_them():
    assert least_window_s(4.0, 9.0, "cpu") == 2 * 9 + 4 * 9
    assert least_window_s(4.0, 9.0, "cuda") == 3 * 9 + 4 * 9


def test_slow_step_makes_the_sweep_longer():
    # Nine windows, each with 2 s besides its steps.
    assert text_of(9.0) == "workers: takes at least 8 min 24 s\n"


def test_too_short_limit_for_a_slow_step_is_warned_of():
    text = text_of(15.0)
    assert "warning: --time-limit 10min is shorter" in text
    assert "--time-limit 14min" in text


def test_unknown_step_leaves_the_time_open():
    assert text_of(None) == (
        "workers: takes at least 54 s; longer if a step takes more than 1 s, as a"
        " window has at least 4 steps\n"
    )
