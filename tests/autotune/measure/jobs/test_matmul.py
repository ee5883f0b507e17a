import time

import pytest

from autotune.measure.jobs import matmul


def _run(**changes):
    measured = {"device": "cpu", "dtype": "float32", "size": 128, "seconds": 0.6, "duty_share": 1.0, "copy_bytes": 0}
    return matmul.run(measured | changes, {})


def test_a_full_load_is_busy_all_the_time():
    before_s = time.monotonic()
    figures = _run()
    assert figures["busy_share"] > 0.9
    assert before_s < figures["window_start_s"] < figures["window_end_s"] < time.monotonic()
    assert figures["window_end_s"] - figures["window_start_s"] == pytest.approx(0.6, abs=0.4)


def test_half_a_load_is_busy_half_the_time():
    assert _run(duty_share=0.5)["busy_share"] == pytest.approx(0.5, abs=0.15)


def test_no_load_measures_no_rate():
    figures = _run(duty_share=0.0)
    assert (figures["flops_per_s"], figures["busy_share"], figures["slices"]) == (None, 0, 0)


def test_the_rate_counts_two_operations_per_multiplication():
    figures = _run()
    in_slices_s = figures["slices"] * figures["slice_s"]
    assert figures["flops_per_s"] == pytest.approx(2 * 128**3 * figures["products"] / in_slices_s, rel=0.3)


def test_a_copy_counts_bytes_read_and_written():
    assert _run(copy_bytes=2**22)["copy_bytes_per_s"] > 1e8


def test_a_duty_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        _run(duty_share=1.5)
