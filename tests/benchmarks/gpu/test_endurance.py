from autotune.measure.clock import FakeClock
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox, TrialFailed
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage import endurance
from tests.benchmarks.gpu.cards import FIXED_BYTES, ROW_BYTES, card
from tests.benchmarks.gpu.rigs import facts, make_rig


def endured(tmp_path, seconds: float, total_bytes: int = 143_771 * 2**20, **changes):
    clock = FakeClock()
    rig = make_rig(tmp_path, card(clock, **changes), gpu=facts(total_bytes), sizes=FULL, clock=clock)
    sheet, error = Sheet(), None
    try:
        endurance.measure(rig, sheet, TimeBox(clock=clock, end_s=clock.monotonic_s() + seconds))
    except (NoTimeLeft, TrialFailed) as failed:
        error = failed
    return {figure.name: figure for figure in sheet.figures}, error


def test_with_time_the_largest_micro_batch_of_the_card_is_held(tmp_path):
    figures, error = endured(tmp_path, 20_000)
    assert error is None
    budget_bytes = figures["memory_budget_bytes"].value
    assert budget_bytes > 90 * 2**30
    assert figures["rows_count"].value == (budget_bytes - FIXED_BYTES) // ROW_BYTES
    assert figures["steps_without_retry_count"].value == 2_000


def test_with_little_time_the_largest_under_a_smaller_limit_is_held(tmp_path):
    figures, error = endured(tmp_path, 1_000)
    assert error is None
    budget_bytes, rows = figures["memory_budget_bytes"].value, figures["rows_count"].value
    assert budget_bytes < 40 * 2**30
    assert rows == (budget_bytes - FIXED_BYTES) // ROW_BYTES
    assert figures["steps_without_retry_count"].value == 2_000


def test_fewer_steps_than_wanted_are_no_result(tmp_path):
    figures, error = endured(tmp_path, 600, 6 * 2**30, step_s_per_row=1.0)
    assert isinstance(error, NoTimeLeft)
    assert figures["steps_without_retry_count"].label == "not measured"
    assert "went without a second try" in figures["steps_without_retry_count"].reason


def test_an_allocation_that_was_tried_twice_fails(tmp_path):
    figures, error = endured(tmp_path, 20_000, retries_from=100)
    assert isinstance(error, TrialFailed)
    assert "had to retry" in str(error)
    assert figures["steps_without_retry_count"].value == 0
