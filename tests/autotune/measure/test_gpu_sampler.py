import itertools
import threading
import time

import pytest

from autotune.core.hardware import GpuFacts, GpuSample, Unavailable, window
from autotune.measure.gpu_sampler import GpuSampler
from autotune.measure.nvml import FakeGpu, FakeGpuMonitor


def fake(uuid: str, *samples: GpuSample | Unavailable) -> FakeGpu:
    facts = GpuFacts(
        uuid=uuid,
        index=0,
        name="Card",
        total_bytes=1,
        mig_enabled=None,
        power_cap_w=None,
        compute_mode=None,
        driver="1",
        compute_capability=None,
    )
    return FakeGpu(facts=facts, samples=samples)


def sample(utilisation: float) -> GpuSample:
    return GpuSample(
        time_s=0,
        utilisation=utilisation,
        used_bytes=None,
        power_w=None,
        sm_clock_mhz=None,
        throttle_reasons=None,
        temperature_c=None,
    )


def test_series_holds_every_gpu_in_order_of_time():
    monitor = FakeGpuMonitor([fake("a", sample(0.1), sample(0.2)), fake("b", sample(0.9))])
    sampler = GpuSampler(monitor, ["a", "b"])
    start_s = time.monotonic()
    sampler.start()
    time.sleep(0.25)
    series = sampler.stop()
    end_s = time.monotonic()
    assert [point.utilisation for point in series["a"]][:2] == [0.1, 0.2]
    times = [point.time_s for point in series["b"]]
    assert times == sorted(times)
    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(times))
    assert window(series["a"], start_s, end_s) == series["a"]


def test_refused_samples_are_left_out_and_explained():
    monitor = FakeGpuMonitor([fake("a", Unavailable(reason="no permission"))])
    with GpuSampler(monitor, ["a"]) as sampler:
        pass
    assert sampler.stop() == {"a": ()}
    assert sampler.reasons() == {"a": "no permission"}


def test_no_thread_is_left_after_stop():
    before = threading.active_count()
    with GpuSampler(FakeGpuMonitor(), []):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_bug_in_the_monitor_is_raised_by_stop():
    class Broken(FakeGpuMonitor):
        def sample(self, uuid):
            raise ZeroDivisionError

    sampler = GpuSampler(Broken(), ["a"])
    sampler.start()
    with pytest.raises(ZeroDivisionError):
        sampler.stop()


def test_sampling_faster_than_nvml_counts_is_refused():
    with pytest.raises(ValueError, match="every 0"):
        GpuSampler(FakeGpuMonitor(), [], interval_s=0.05)


def test_stop_without_start_gives_empty_series():
    assert GpuSampler(FakeGpuMonitor(), ["a"]).stop() == {"a": ()}
