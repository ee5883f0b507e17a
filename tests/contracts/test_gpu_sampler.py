"""One suite for every GPU sampler: in this process, in a process over scripted GPUs, and over a real driver."""

import itertools
import time
from dataclasses import replace

import pytest

from autotune.measure.gpu_sampler import GpuSampler
from autotune.measure.nvml import NvmlMonitor
from tests.fakes import CARD, COUNTERS, SAMPLE, FakeGpu, FakeGpuMonitor, FakeGpuSampler

UUIDS = ("GPU-one", "GPU-two")


def scripted_monitor() -> FakeGpuMonitor:
    """Two GPUs that never change."""
    return FakeGpuMonitor([FakeGpu(facts=replace(CARD, uuid=uuid), samples=[SAMPLE], gpm=[COUNTERS]) for uuid in UUIDS])


SCRIPTED = [
    "-c",
    "from autotune.measure import gpu_sampler\n"
    "from tests.contracts.test_gpu_sampler import scripted_monitor\n"
    "gpu_sampler.GPM_WINDOW_S = 0.1\n"
    "gpu_sampler.main(scripted_monitor())",
]


@pytest.fixture(params=["scripted", "process", "hardware"])
def uuids(request):
    if request.param != "hardware":
        return UUIDS
    monitor = NvmlMonitor()
    if monitor.why_absent():
        pytest.skip(f"needs an NVIDIA GPU: {monitor.why_absent()}")  # no CI machine of this project has one
    found = tuple(gpu.uuid for gpu in monitor.devices())
    monitor.close()
    return found


@pytest.fixture
def sampler(request, uuids):
    kind = request.node.callspec.params["uuids"]
    if kind == "scripted":
        made = FakeGpuSampler(scripted_monitor(), uuids)
    elif kind == "process":
        made = GpuSampler(uuids, program=SCRIPTED)
    else:
        made = GpuSampler(uuids)
    yield made
    made.stop()


def test_every_gpu_gives_samples_in_order_of_time_each_once_and_windows_that_do_not_overlap(sampler, uuids):
    sampler.stop()
    assert not any(series.samples or series.gpm for series in sampler.take().values())
    started_s = time.monotonic()
    sampler.start()
    first = sampler.take()
    sampler.start()  # changes nothing
    time.sleep(0.35)
    second = sampler.take()
    ended_s = time.monotonic()
    assert set(first) == set(second) == set(uuids)
    for uuid in uuids:
        times_s = [sample.time_s for series in (first, second) for sample in series[uuid].samples]
        assert times_s == sorted(set(times_s))
        assert started_s <= times_s[0] <= times_s[-1] <= ended_s
        assert all(one.utilisation is None or 0 <= one.utilisation <= 1 for one in second[uuid].samples)
        windows = first[uuid].gpm + second[uuid].gpm
        assert windows or second[uuid].gpm_lacking
        assert all(one.start_s <= one.end_s for one in windows)
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(windows))
    sampler.stop()
    sampler.stop()


def test_scripted_readings_arrive_unchanged_from_another_process():
    with GpuSampler(UUIDS[:1], program=SCRIPTED) as there:
        there.take()
        time.sleep(0.3)
        (series,) = there.take().values()
    assert {replace(one, time_s=0.0, missing=()) for one in series.samples} == {replace(SAMPLE, missing=())}
    assert {replace(one, start_s=0.0, end_s=0.0) for one in series.gpm} == {COUNTERS}
