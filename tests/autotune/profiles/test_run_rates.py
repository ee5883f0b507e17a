"""Throughput of a run, and the steps that it is computed from."""

import math

import pytest

from autotune.profiles.decide.run_rates import (
    MOST_WARM_UP_STEPS,
    run_rate,
    settled_steps,
)
from tests.autotune.advice.runs import run_of
from trainer.formats.run_record import Run


def run_resumed_after_20_steps() -> Run:
    """Return a run of 20 steps, then 2 of warm-up and 18 settled ones."""
    before_resuming = [1.0] * 20
    warm_up = [50.0] * 2
    settled = [100.0, 25.0] * 9
    return run_of(before_resuming + warm_up + settled, resumed_step=20)


def test_settled_steps_follow_a_tenth_of_warm_up():
    settled = settled_steps(run_resumed_after_20_steps())
    assert [row.step for row in settled] == list(range(23, 41))


def test_rate_of_a_run_is_tokens_over_seconds():
    # Steps of as many tokens alternate between 100 and 25 tokens/s.
    assert run_rate(run_resumed_after_20_steps()).value == pytest.approx(
        2 / (1 / 100 + 1 / 25)
    )


def test_warm_up_of_a_long_run_is_limited():
    assert len(settled_steps(run_of([1.0] * 1000))) == 1000 - MOST_WARM_UP_STEPS


@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        pytest.param(50, pytest.approx(100.0), id="without noise"),
        pytest.param(1, None, id="too short"),
    ],
)
def test_bounds_of_a_runs_rate(steps, bound):
    interval = run_rate(run_of([100.0] * steps)).interval
    assert interval.value == pytest.approx(100.0)
    assert interval.low == bound
    assert interval.high == bound


@pytest.mark.parametrize(
    "rates",
    [pytest.param([], id="no steps"), pytest.param([math.nan] * 5, id="not numbers")],
)
def test_run_without_figures_has_no_rate(rates):
    assert run_rate(run_of(rates)) is None
