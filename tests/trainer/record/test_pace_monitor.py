import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health.findings import Action, Kind
from trainer.record.pace_monitor import (
    STARVED_SHARE,
    STRAGGLER_RATIO,
    STREAK_ROWS,
    PaceMonitor,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times of each rank per step, in a row whose steps take a second."""

    data_wait_s: list[float]
    compute_s: list[float | None]


USUAL = Row(data_wait_s=[0.0] * 4, compute_s=[1.0] * 4)
MANY_ROWS = 10 * STREAK_ROWS
"""Rows enough for several findings, if they were not reported only once."""


def waiting(share):
    """Return a row in which rank 1 waits for data for a share of the time."""
    return Row(data_wait_s=[0.0, share, 0.0, 0.0], compute_s=USUAL.compute_s)


def slow(ratio, rank=2):
    """Return a row in which a rank computes for a multiple of the others' time."""
    compute_s = list(USUAL.compute_s)
    compute_s[rank] = ratio
    return Row(data_wait_s=USUAL.data_wait_s, compute_s=compute_s)


def findings_of(rows):
    """Return the number of the row, counted from 1, and the kind of each finding."""
    monitor = PaceMonitor()
    findings = []
    for number, row in enumerate(rows, start=1):
        new_findings = monitor.check(
            step_s=1.0, data_wait_s=row.data_wait_s, compute_s=row.compute_s
        )
        findings += [(number, finding.kind) for finding in new_findings]
    return findings


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([USUAL] * STREAK_ROWS + [waiting(0.2)] * MANY_ROWS, id="later"),
        pytest.param([waiting(0.9)] * MANY_ROWS, id="always"),
    ],
)
def test_reports_slow_data_loading_once(rows):
    # The first rows do not count, as DataLoader workers are still starting.
    assert findings_of(rows) == [(2 * STREAK_ROWS, Kind.STARVED)]


def test_ignores_slow_data_loading_in_the_first_rows():
    rows = [waiting(0.9)] * STREAK_ROWS + [USUAL] * MANY_ROWS
    assert findings_of(rows) == []


@pytest.fixture
def straggler_and_starved():
    """Findings about a rank that computes slowly, and another that waits for data."""
    monitor = PaceMonitor(hosts=("n1", "n1", "n2"))
    findings = []
    for _ in range(2 * STREAK_ROWS):
        findings += monitor.check(
            step_s=2.0,
            data_wait_s=[0.0, 0.1, 0.5, 0.0, 0.0],
            compute_s=[1.0, 1.0, 1.0, 2.0, 3.0],
        )
    straggler, starved = findings
    return straggler, starved


def test_describes_straggler(straggler_and_starved):
    straggler, _ = straggler_and_starved
    assert (straggler.kind, straggler.action) == (Kind.STRAGGLER, Action.WARN)
    assert straggler.values == {
        "rank": 4.0,
        "ratio": 3.0,
        "compute_s": 3.0,
        "median_s": 1.0,
    }
    assert re.search(r"rank 4 takes 3\.00 times.*also slow: 3", straggler.message)
    assert "nvidia-smi -q -d PERFORMANCE" in straggler.next_step
    assert any("heat" in cause for cause in straggler.event(1).causes)


def test_describes_slow_data_loading(straggler_and_starved):
    _, starved = straggler_and_starved
    assert (starved.kind, starved.action) == (Kind.STARVED, Action.WARN)
    assert starved.values == {
        "rank": 2.0,
        "share": 0.25,
        "data_wait_s": 0.5,
        "step_s": 2.0,
    }
    assert "rank 2 (n2) waits for data 25% of the time" in starved.message
    assert "autotune workers PROFILE" in starved.next_step
    assert "train.data.num_workers" in starved.next_step
    assert "train.data.stage_to" in starved.next_step


bad_rows = pytest.mark.parametrize(
    ("bad_row", "first_finding"),
    [
        pytest.param(waiting(0.5), 2 * STREAK_ROWS, id="waiting"),
        pytest.param(slow(2.0), STREAK_ROWS, id="slow"),
    ],
)


@bad_rows
def test_shorter_streaks_are_not_reported(bad_row, first_finding):
    almost_a_streak = [bad_row] * (STREAK_ROWS - 1)
    assert findings_of([*almost_a_streak, USUAL] * 20) == []


@bad_rows
def test_short_pause_does_not_repeat_a_finding(bad_row, first_finding):
    short_pause = [USUAL] * (STREAK_ROWS - 1)
    rows = [bad_row] * first_finding + (short_pause + [bad_row] * STREAK_ROWS) * 5
    assert len(findings_of(rows)) == 1


@bad_rows
def test_reports_again_after_good_rows(bad_row, first_finding):
    long_pause = [USUAL] * STREAK_ROWS
    rows = [bad_row] * first_finding + long_pause + [bad_row] * STREAK_ROWS
    assert [number for number, _ in findings_of(rows)] == [
        first_finding,
        first_finding + 2 * STREAK_ROWS,
    ]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [slow(2.0, rank=number % 4) for number in range(MANY_ROWS)],
            id="ranks in turn",
        ),
        pytest.param(
            [Row(data_wait_s=[0.0] * 4, compute_s=[1.0, None, 5.0, 1.0])] * MANY_ROWS,
            id="unknown times",
        ),
        pytest.param([Row(data_wait_s=[], compute_s=[])] * MANY_ROWS, id="no ranks"),
        pytest.param(
            [Row(data_wait_s=[0.0], compute_s=[9.0])] * MANY_ROWS, id="single rank"
        ),
    ],
)
def test_reports_no_straggler_without_one(rows):
    assert findings_of(rows) == []


@given(
    share=st.floats(0, STARVED_SHARE),
    ratios=st.lists(st.floats(1, STRAGGLER_RATIO - 1e-6), min_size=1, max_size=9),
)
def test_reports_nothing_within_the_thresholds(share, ratios):
    row = Row(data_wait_s=[share] * len(ratios), compute_s=list(ratios))
    assert findings_of([row] * (3 * STREAK_ROWS)) == []
