import time

import pytest

from autotune.core.hardware import Unavailable
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.watch import Watch, write_readings
from tests.benchmarks.gpu.rigs import ThreadSampler, facts, monitor_of


@pytest.fixture(scope="module")
def watched():
    """A watch of half a second over a scripted GPU, and its beginning and end."""
    sampler = ThreadSampler(monitor_of(facts()), ["GPU-1"], gpm_window_s=0.1)
    start_s = time.monotonic()
    with Watch(sampler, "GPU-1", "") as watch:
        time.sleep(0.5)
    return watch, start_s, time.monotonic()


def test_any_stretch_of_the_watched_time_can_be_read(watched):
    watch, start_s, end_s = watched
    whole, half = watch.samples(start_s, end_s), watch.samples(start_s, (start_s + end_s) / 2)
    assert 0 < len(half) < len(whole)
    assert all(start_s <= sample.time_s <= end_s for sample in whole)
    assert all(start_s <= one.start_s <= one.end_s <= end_s for one in watch.windows(start_s, end_s))


def test_a_stretch_without_a_reading_says_so(watched):
    watch, _, end_s = watched
    assert watch.samples(end_s + 1, end_s + 2) == Unavailable(reason="no sample fell into the window")
    assert watch.windows(end_s + 1, end_s + 2) == Unavailable(reason="no window of counters lay in it")


def test_without_a_gpu_nothing_is_sampled_and_the_reason_is_told():
    sampler = ThreadSampler(monitor_of(facts()), [], gpm_window_s=0.1)
    with Watch(sampler, None, "no GPU here") as watch:
        assert sampler._threads == []
    assert watch.samples(0, 1) == watch.windows(0, 1) == Unavailable(reason="no GPU here")


def test_readings_stand_in_the_sheet_beside_what_is_known(watched):
    watch, start_s, end_s = watched
    sheet = Sheet()
    write_readings(sheet, "load", watch, start_s, end_s, busy_share=0.8)
    figures = {figure.name: figure for figure in sheet.figures}
    assert figures["load_nvml_utilisation_share"].value == 0.75
    assert figures["load_gpm_sm_utilisation_share"].expected == 0.8
    assert figures["load_gpm_dram_active_share"].label == "not measured"
    assert sheet.details["load_readings"]["nvml_samples"]
