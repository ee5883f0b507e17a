"""What the contract suite cannot show of the process that samples GPUs: windows end to end, its faults, and its end."""

import subprocess
import sys
import time

import psutil
import pytest

from autotune.core.hardware import GpmWindow, GpuFacts, GpuSample, GpuSeries, Unavailable
from autotune.measure import gpu_sampler
from autotune.measure.gpu_sampler import GpuSampler, sample_gpus, series_of
from tests.fakes import FakeClock, FakeGpu, FakeGpuMonitor

READING = """
import json, sys
def reading(uuid):
    sys.stdout.write(json.dumps([uuid, "sample", {"reason": "asleep"}]) + "\\n")
    sys.stdout.flush()
"""
ONCE = READING + "reading('0')\nsys.stdin.read()"
HANGS = READING + "import time\nreading('0')\ntime.sleep(60)"
SILENT = "import time\ntime.sleep(60)"
DIES = "raise SystemExit(3)"
DIES_LATE = READING + "reading('0')"
BREAKS_OFF = """import sys\nsys.stdout.write('["0", "sam')"""

FACTS = GpuFacts(
    uuid="0", index=0, name="Card", total_bytes=1, mig_enabled=None, power_cap_w=None, compute_mode=None, driver="1",
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


def sampler_of(program: str) -> GpuSampler:
    return GpuSampler(["0"], program=["-c", program])


def both(reason: str) -> dict[str, GpuSeries]:
    return {"0": GpuSeries(lacking=reason, gpm_lacking=reason)}


@pytest.fixture
def no_child_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in after if child.status() != psutil.STATUS_ZOMBIE] == []


def sampled(ticks, samples=(SAMPLE,), gpm=(WINDOW,)):
    """The readings of so many ticks, a quarter of a second apart, and of windows of a second."""
    clock, readings, left = FakeClock(), [], iter(range(ticks))

    def ended(wait_s):
        clock.sleep(wait_s)
        return next(left, None) is None

    monitor = FakeGpuMonitor([FakeGpu(facts=FACTS, samples=samples, gpm=gpm)], clock=clock)
    sample_gpus(monitor, ["0"], 0.25, 1.0, write=readings.append, ended=ended, clock=clock)
    return readings


def test_windows_of_counters_lie_end_to_end():
    (series,) = series_of(sampled(9), {"0": GpuSeries()}).values()
    assert [(one.start_s, one.end_s) for one in series.gpm] == [(1000.0, 1001.0), (1001.0, 1002.0)]
    assert [one.time_s for one in series.samples] == [1000 + 0.25 * tick for tick in range(10)]


def test_refused_readings_are_left_out_and_their_reason_stays_until_there_is_one():
    refused = sampled(9, samples=[Unavailable(reason="no permission")], gpm=[Unavailable(reason="no Hopper")])
    found = series_of(refused, {"0": GpuSeries()})
    assert found == {"0": GpuSeries(lacking="no permission", gpm_lacking="no Hopper")}
    assert series_of([], found) == found
    again = series_of([("0", "sample", SAMPLE)], found)
    assert again == {"0": GpuSeries(samples=(SAMPLE,), gpm_lacking="no Hopper")}


def test_sampling_faster_than_nvml_counts_is_refused():
    with pytest.raises(ValueError, match=r"every 0\.05 s"):
        GpuSampler([], interval_s=0.05)
    with pytest.raises(ValueError, match=r"every 0\.01 s"):
        GpuSampler([], gpm_window_s=0.01)


def test_without_gpus_nothing_is_started(no_child_left):
    before = psutil.Process().children()  # of other tests
    with GpuSampler([]) as sampler:
        assert psutil.Process().children() == before
        assert sampler.take() == {}


@pytest.mark.parametrize("program", [DIES, BREAKS_OFF])
def test_process_that_died_is_a_reason_from_then_on_and_is_not_started_again(program, no_child_left):
    with sampler_of(program) as sampler:
        assert sampler.take() == both("the process that samples the GPUs has ended")
        sampler.start()
        assert sampler._process is None
        assert sampler.take() == both("the process that samples the GPUs has ended")


def test_process_that_dies_later_gives_what_it_read(no_child_left):
    with sampler_of(DIES_LATE) as sampler:
        assert sampler.take()["0"].lacking == "asleep"
        assert sampler.take() == both("the process that samples the GPUs has ended")


@pytest.mark.parametrize(("program", "reads"), [(SILENT, False), (HANGS, True)])
def test_process_that_hangs_is_killed_within_the_limit(program, reads, monkeypatch, no_child_left):
    monkeypatch.setattr(gpu_sampler, "START_WITHIN_S", 15.0 if reads else 1.0)
    monkeypatch.setattr(gpu_sampler, "ANSWER_WITHIN_S", 1.0)
    with sampler_of(program) as sampler:
        hung = sampler._process
        if reads:
            assert sampler.take()["0"].lacking == "asleep"
        started_s = time.monotonic()
        assert sampler.take() == both("the process that samples the GPUs has not answered for 1 s")
        assert time.monotonic() - started_s < 5
        assert hung.poll() is not None


def test_process_that_does_not_hear_the_end_is_killed(monkeypatch, no_child_left):
    sampler = sampler_of(SILENT)
    sampler.start()
    process = sampler._process
    sampler.stop(grace_s=0.2)
    process.wait(timeout=5)
    assert process.returncode == -9


def test_process_that_hears_the_end_leaves_by_itself(no_child_left):
    sampler = sampler_of(ONCE)
    sampler.start()
    process = sampler._process
    sampler.take()
    sampler.stop(grace_s=15)
    assert process.returncode == 0


def test_sampler_that_was_not_started_says_so():
    assert GpuSampler(["0"]).take() == both("the sampler was not started")


def test_the_file_is_rolled_and_bounded(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "_ROLL_BYTES", 100)
    with sampler_of(READING + "import time\nwhile True: reading('0'); time.sleep(0.001)") as sampler:
        offsets = []
        for _ in range(20):
            assert sampler.take()["0"].lacking == "asleep"
            offsets.append(sampler._offset)
        assert 0 in offsets
    full = "from autotune.measure import gpu_sampler; gpu_sampler.MOST_BYTES = 0; gpu_sampler.main()"
    command = [sys.executable, "-c", full, "1", "1", "0"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout == b""


def test_without_a_driver_the_real_process_gives_its_reason(no_child_left):
    with GpuSampler(["GPU-none"]) as sampler:
        series = sampler.take()["GPU-none"]
    assert series.samples == ()
    assert series.gpm == ()
    assert series.lacking
