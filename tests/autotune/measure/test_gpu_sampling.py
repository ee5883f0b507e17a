import io
import json
import os
import threading

from autotune.core.hardware import GpmWindow, GpuFacts, GpuSample, GpuSeries, Unavailable
from autotune.measure import gpu_sampling
from autotune.measure.clock import FakeClock
from autotune.measure.gpu_sampling import Sampling, series_from_json, serve
from autotune.measure.nvml import FakeGpu, FakeGpuMonitor

FACTS = GpuFacts(
    uuid="a", index=0, name="Card", total_bytes=1, mig_enabled=None, power_cap_w=None, compute_mode=None, driver="1",
    compute_capability=None,
)  # fmt: skip
SAMPLE = GpuSample(
    time_s=0, utilisation=0.5, used_bytes=None, power_w=None, sm_clock_mhz=None, throttle_reasons=("sw_power_cap",),
    temperature_c=None, process_count=1,
)  # fmt: skip
WINDOW = GpmWindow(
    start_s=0, end_s=0, sm_utilisation=0.7, sm_occupancy=None, tensor_active=None, dram_active=None,
    pcie_rx_bytes_per_s=None,
)  # fmt: skip


def sampling_of(clock, samples=(SAMPLE,), gpm=(WINDOW,), gpm_window_s=1.0) -> Sampling:
    monitor = FakeGpuMonitor([FakeGpu(facts=FACTS, samples=samples, gpm=gpm)], clock=clock)
    return Sampling(monitor, "a", gpm_window_s=gpm_window_s, clock=clock)


def test_windows_of_counters_lie_end_to_end():
    clock = FakeClock()
    sampling = sampling_of(clock)
    for _ in range(9):
        clock.sleep(0.25)
        sampling.tick()
    series = sampling.take()
    assert [(one.start_s, one.end_s) for one in series.gpm] == [(1000.0, 1001.0), (1001.0, 1002.0)]
    assert [one.time_s for one in series.samples] == [1000.25 + 0.25 * tick for tick in range(9)]


def test_what_was_taken_is_not_given_again():
    sampling = sampling_of(FakeClock(), gpm_window_s=0.0)
    sampling.tick()
    assert len(sampling.take().samples) == 1
    assert sampling.take() == GpuSeries()


def test_refused_readings_are_left_out_and_explained():
    refused = (Unavailable(reason="no permission"),)
    sampling = sampling_of(FakeClock(), samples=refused, gpm=(Unavailable(reason="no Hopper"),), gpm_window_s=0.0)
    sampling.tick()
    assert sampling.take() == GpuSeries(lacking="no permission", gpm_lacking="no Hopper")


def test_nobody_who_asks_bounds_what_is_kept(monkeypatch):
    monkeypatch.setattr(gpu_sampling, "MOST_SAMPLES", 3)
    sampling = sampling_of(FakeClock(), gpm_window_s=0.0)
    for _ in range(5):
        sampling.tick()
    series = sampling.take()
    assert (len(series.samples), len(series.gpm)) == (3, 3)


def test_every_line_is_answered_until_the_pipe_closes():
    requests, pipe = os.pipe()
    answers = []
    served = threading.Thread(
        target=serve, args=(sampling_of(FakeClock(), gpm_window_s=0.0), 0.1, requests, answers.append)
    )
    os.write(pipe, b"take\ntake\n")
    served.start()
    os.close(pipe)
    served.join(timeout=5)
    os.close(requests)
    assert not served.is_alive()
    first, second = (series_from_json(json.loads(answer)) for answer in answers)
    assert [one.throttle_reasons for one in first.samples] == [("sw_power_cap",)]
    assert [one.sm_utilisation for one in first.gpm] == [0.7]
    assert second == GpuSeries()


def test_series_survives_its_way_between_processes():
    sampling = sampling_of(FakeClock(), gpm_window_s=0.0)
    sampling.tick()
    series = sampling.take()
    answers = io.StringIO()

    class Once:
        def tick(self):
            """Nothing is added."""

        def take(self):
            return series

    requests, pipe = os.pipe()
    os.write(pipe, b"take\n")
    os.close(pipe)
    serve(Once(), 0.1, requests, answers.write)
    os.close(requests)
    assert series_from_json(json.loads(answers.getvalue())) == series
    assert isinstance(series.samples[0], GpuSample)
