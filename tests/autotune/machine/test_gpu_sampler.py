"""One suite for every GPU sampler: in this process, in a process over scripted GPUs,
and over a real driver.

Then what it cannot show of the process: windows end to end, its faults, and its end.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from autotune.machine import gpu_sampler
from autotune.machine.gpu_sampler import GpuSampler, sample_gpus, series_of
from autotune.machine.nvml import NvmlMonitor
from autotune.machine.values import GpuSeries, Unavailable
from testbed.fakes import (
    GPM_WINDOW,
    GPU_FACTS,
    SAMPLE,
    FakeClock,
    FakeGpu,
    FakeGpuMonitor,
    FakeGpuSampler,
)

UUIDS = ("GPU-one", "GPU-two")


def scripted_monitor() -> FakeGpuMonitor:
    return FakeGpuMonitor(
        [
            FakeGpu(
                facts=replace(GPU_FACTS, uuid=uuid), samples=[SAMPLE], gpm=[GPM_WINDOW]
            )
            for uuid in UUIDS
        ]
    )


@contextlib.contextmanager
def started(sampler: GpuSampler) -> Iterator[GpuSampler]:
    sampler.start()
    yield sampler
    sampler.stop()


SCRIPTED = [
    "-c",
    (
        "from autotune.machine import gpu_sampler\n"
        "from tests.autotune.machine.test_gpu_sampler import scripted_monitor\n"
        "gpu_sampler.GPM_WINDOW_S = 0.1\n"
        "gpu_sampler.main(scripted_monitor())"
    ),
]


@pytest.fixture(params=["scripted", "process", "hardware"])
def uuids(request):
    if request.param != "hardware":
        return UUIDS
    monitor = NvmlMonitor()
    if monitor.why_absent():
        # No CI machine of this project has one.
        pytest.skip(f"needs an NVIDIA GPU: {monitor.why_absent()}")
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


def test_every_gpu_gives_samples_in_order_of_time_each_once_and_windows_that_do_not_overlap(
    sampler, uuids
):
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
        times_s = [
            sample.time_s
            for series in (first, second)
            for sample in series[uuid].samples
        ]
        assert times_s == sorted(set(times_s))
        assert started_s <= times_s[0] <= times_s[-1] <= ended_s
        assert all(
            one.utilisation is None or 0 <= one.utilisation <= 1
            for one in second[uuid].samples
        )
        windows = first[uuid].gpm + second[uuid].gpm
        assert windows or second[uuid].gpm_lacking
        assert all(one.start_s <= one.end_s for one in windows)
        assert all(
            one.end_s <= other.start_s for one, other in itertools.pairwise(windows)
        )
    sampler.stop()
    sampler.stop()


def test_scripted_readings_arrive_unchanged_from_another_process():
    with started(GpuSampler(UUIDS[:1], program=SCRIPTED)) as there:
        there.take()
        time.sleep(0.3)
        (series,) = there.take().values()
    assert {replace(one, time_s=0.0, missing=()) for one in series.samples} == {
        replace(SAMPLE, missing=())
    }
    assert {replace(one, start_s=0.0, end_s=0.0) for one in series.gpm} == {GPM_WINDOW}


READ = """
import pickle, sys, time
from autotune.machine.values import Unavailable
def read():
    pickle.dump(("0", "sample", Unavailable(reason="asleep")), sys.stdout.buffer)
    sys.stdout.flush()
"""
ONCE = READ + "read()\nsys.stdin.read()"
HANGS = READ + "read()\ntime.sleep(60)"
SILENT = "import time\ntime.sleep(60)"
DIES = "raise SystemExit(3)"
DIES_LATE = READ + "read()"
BREAKS_OFF = READ + "sys.stdout.buffer.write(pickle.dumps(('0', 'sample'))[:-3])"


def sampler_of(program: str) -> GpuSampler:
    return GpuSampler(["0"], program=["-c", program])


def both(reason: str) -> dict[str, GpuSeries]:
    return {"0": GpuSeries(lacking=reason, gpm_lacking=reason)}


@pytest.fixture
def no_child_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before
    ]
    assert [child for child in after if child.status() != psutil.STATUS_ZOMBIE] == []


def sampled(samples=(SAMPLE,), gpm=(GPM_WINDOW,)):
    """The readings of ten ticks, a tenth of a second apart, and of windows of half a
    second."""
    clock, readings, left = FakeClock(), [], iter(range(10))

    def ended(wait_s):
        clock.sleep(wait_s)
        return next(left, None) is None

    monitor = FakeGpuMonitor(
        [FakeGpu(facts=replace(GPU_FACTS, uuid="0"), samples=samples, gpm=gpm)],
        clock=clock,
    )
    sample_gpus(monitor, ["0"], write=readings.append, ended=ended, clock=clock)
    return readings


def test_windows_of_counters_lie_end_to_end():
    (series,) = series_of(sampled(), {"0": GpuSeries()}).values()
    assert [one.time_s for one in series.samples] == pytest.approx(
        [1000 + tick / 10 for tick in range(11)]
    )
    first, second = series.gpm
    assert first.end_s == second.start_s
    assert (first.start_s, first.end_s, second.end_s) == pytest.approx(
        (1000.0, 1000.5, 1001.0)
    )


def test_refused_readings_are_left_out_and_their_reason_stays_until_there_is_one():
    refused = sampled(
        samples=[Unavailable(reason="no permission")],
        gpm=[Unavailable(reason="no Hopper")],
    )
    found = series_of(refused, {"0": GpuSeries()})
    assert found == {"0": GpuSeries(lacking="no permission", gpm_lacking="no Hopper")}
    assert series_of([], found) == found
    assert series_of([("0", "sample", SAMPLE)], found) == {
        "0": GpuSeries(samples=(SAMPLE,), gpm_lacking="no Hopper")
    }


def test_without_gpus_nothing_is_started(no_child_left):
    before = psutil.Process().children()  # of other tests
    with started(GpuSampler([])) as sampler:
        assert psutil.Process().children() == before
        assert sampler.take() == {}


@pytest.mark.parametrize("program", [DIES, BREAKS_OFF, DIES_LATE])
def test_process_that_died_gives_what_it_read_is_a_reason_from_then_on_and_is_not_started_again(
    program, no_child_left
):
    with started(sampler_of(program)) as sampler:
        if program is DIES_LATE:
            assert sampler.take()["0"].lacking == "asleep"
        assert sampler.take() == both("the process that samples the GPUs has exited")
        sampler.start()
        assert sampler._process is None
        assert sampler.take() == both("the process that samples the GPUs has exited")


@pytest.mark.parametrize(("program", "reads"), [(SILENT, False), (HANGS, True)])
def test_process_that_hangs_is_killed_within_the_limit(
    program, reads, monkeypatch, no_child_left
):
    monkeypatch.setattr(gpu_sampler, "START_WITHIN_S", 15.0 if reads else 1.0)
    monkeypatch.setattr(gpu_sampler, "ANSWER_WITHIN_S", 1.0)
    with started(sampler_of(program)) as sampler:
        hung = sampler._process
        if reads:
            assert sampler.take()["0"].lacking == "asleep"
        started_s = time.monotonic()
        assert sampler.take() == both(
            "the process that samples the GPUs has not responded for 1 s"
        )
        assert time.monotonic() - started_s < 5
        assert hung.poll() is not None


@pytest.mark.parametrize(
    ("program", "reads", "code"), [(SILENT, False, -9), (ONCE, True, 0)]
)
def test_process_that_does_not_hear_the_end_is_killed_and_another_leaves_by_itself(
    program, reads, code, no_child_left
):
    sampler = sampler_of(program)
    sampler.start()
    process = sampler._process
    if reads:
        sampler.take()
    sampler.stop(grace_s=15 if reads else 0.2)
    assert process.wait(timeout=5) == code


def test_without_a_start_or_a_driver_the_reason_is_said(no_child_left):
    assert GpuSampler(["0"]).take() == both("the sampler was not started")
    with started(GpuSampler(["GPU-none"])) as sampler:
        series = sampler.take()["GPU-none"]
    assert (series.samples, series.gpm) == ((), ())
    assert series.lacking


def test_readings_that_nobody_takes_are_bounded(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "MOST_READINGS", 3)
    with started(
        sampler_of(READ + "[read() for _ in range(1000)]\nsys.stdin.read()")
    ) as sampler:
        sampler.take()
        time.sleep(0.5)
        assert len(sampler._readings) <= 3
