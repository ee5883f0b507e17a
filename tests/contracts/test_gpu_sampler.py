"""One suite for every GPU sampler: in this process, in a process over scripted GPUs, and over a real driver."""

import itertools
import time

import pytest

from autotune.core.hardware import GpmWindow, GpuFacts, GpuSample
from autotune.measure.gpu_sampler import GpuSampler
from autotune.measure.nvml import NvmlMonitor
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeGpuSampler

UUIDS = ("GPU-one", "GPU-two")


def scripted_monitor() -> FakeGpuMonitor:
    """Two GPUs that never change."""
    sample = GpuSample(
        time_s=0.0, utilisation=0.75, used_bytes=3 * 2**30, power_w=312.5, sm_clock_mhz=1700,
        throttle_reasons=("sw_power_cap",), temperature_c=61, process_count=1,
    )  # fmt: skip
    window = GpmWindow(
        start_s=0.0, end_s=0.0, sm_utilisation=0.9, sm_occupancy=0.5, tensor_active=0.4, dram_active=None,
        pcie_rx_bytes_per_s=1e6,
    )  # fmt: skip
    facts = [
        GpuFacts(
            uuid=uuid, index=index, name="Card", total_bytes=2**36, mig_enabled=None, power_cap_w=None,
            compute_mode=None, driver="1", compute_capability=None,
        )
        for index, uuid in enumerate(UUIDS)
    ]  # fmt: skip
    return FakeGpuMonitor([FakeGpu(facts=one, samples=[sample], gpm=[window]) for one in facts])


SCRIPTED = [
    "-c",
    "from autotune.measure.gpu_sampler import main\n"
    "from tests.contracts.test_gpu_sampler import scripted_monitor\n"
    "main(scripted_monitor())",
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
        made = GpuSampler(uuids, gpm_window_s=0.1, program=SCRIPTED)
    else:
        made = GpuSampler(uuids, gpm_window_s=0.1)
    yield made
    made.stop()


def test_every_gpu_gives_samples_from_after_the_start_in_order_of_time(sampler, uuids):
    started_s = time.monotonic()
    sampler.start()
    sampler.take()
    time.sleep(0.35)
    taken = sampler.take()
    ended_s = time.monotonic()
    assert set(taken) == set(uuids)
    for series in taken.values():
        times_s = [sample.time_s for sample in series.samples]
        assert times_s == sorted(times_s)
        assert started_s <= times_s[0] <= times_s[-1] <= ended_s
        assert all(sample.utilisation is None or 0 <= sample.utilisation <= 1 for sample in series.samples)


def test_windows_of_counters_do_not_overlap_or_there_is_a_reason(sampler):
    sampler.start()
    sampler.take()
    time.sleep(0.35)
    for series in sampler.take().values():
        assert series.gpm or series.gpm_lacking
        assert all(one.start_s <= one.end_s for one in series.gpm)
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(series.gpm))


def test_nothing_is_given_twice(sampler):
    sampler.start()
    first, second = sampler.take(), sampler.take()
    for uuid, series in second.items():
        later_s = [sample.time_s for sample in series.samples]
        assert all(sample.time_s < min(later_s, default=float("inf")) for sample in first[uuid].samples)


def test_a_second_start_changes_nothing(sampler, uuids):
    sampler.start()
    before = sampler.take()
    sampler.start()
    after = sampler.take()
    assert set(before) == set(after) == set(uuids)


def test_before_its_start_nothing_was_sampled(sampler):
    assert not any(series.samples or series.gpm for series in sampler.take().values())


def test_it_may_be_stopped_twice_and_without_a_start(sampler):
    sampler.stop()
    sampler.start()
    sampler.stop()
    sampler.stop()


def test_scripted_readings_arrive_unchanged_from_another_process():
    there = GpuSampler(UUIDS[:1], gpm_window_s=0.1, program=SCRIPTED)
    with there:
        there.take()
        time.sleep(0.3)
        (series,) = there.take().values()
    here = FakeGpuSampler(scripted_monitor(), UUIDS[:1])
    here.start()
    (expected,) = here.take().values()
    assert {_without_times(one) for one in series.samples} == {_without_times(one) for one in expected.samples}
    assert {one.tensor_active for one in series.gpm} == {one.tensor_active for one in expected.gpm} == {0.4}


def _without_times(sample: GpuSample) -> tuple[object, ...]:
    return sample.utilisation, sample.used_bytes, sample.power_w, sample.throttle_reasons, sample.process_count
