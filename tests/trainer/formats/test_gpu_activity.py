"""Activity of a GPU, from samples and counter windows."""

from dataclasses import astuple, replace

from hypothesis import given
from hypothesis import strategies as st

from testbed.fakes import GPM_WINDOW, SAMPLE
from trainer.formats.gpu_activity import GpuActivity, activity_of, combine_known

SHARES = st.none() | st.floats(0, 1)


def test_activity_without_readings_is_unknown():
    assert activity_of((), ()) == GpuActivity()
    assert set(astuple(GpuActivity())) == {None}


@given(st.lists(st.tuples(SHARES, SHARES), max_size=9))
def test_shares_lie_between_their_readings(shares):
    samples = [
        replace(SAMPLE, utilisation=busy, memory_utilisation=memory)
        for busy, memory in shares
    ]
    activity = activity_of(samples, [])
    pairs = zip((activity.busy_share, activity.memory_busy_share), (0, 1), strict=True)
    for mean, column in pairs:
        known = [pair[column] for pair in shares if pair[column] is not None]
        if known:
            assert min(known) - 1e-9 <= mean <= max(known) + 1e-9
        else:
            assert mean is None


def test_counters_are_means_of_windows():
    windows = [GPM_WINDOW, replace(GPM_WINDOW, tensor_active=0.8, dram_active=None)]
    activity = activity_of([], windows)
    assert activity.tensor_active_share == (0.4 + 0.8) / 2
    assert activity.dram_active_share == 0.3


def test_numbers_that_are_not_finite_are_unknown():
    assert combine_known(max, [float("nan"), None, 2.0]) == 2.0
    assert combine_known(max, [float("inf"), None]) is None
