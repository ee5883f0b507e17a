"""One suite for every GPU sampler: in this process, scripted, and over a real driver.

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
from testbed.fakes import (
    GPM_WINDOW,
    GPU_FACTS,
    SAMPLE,
    FakeClock,
    FakeGpu,
    FakeGpuMonitor,
    FakeGpuSampler,
)
from trainer.formats.gpus import GpuSeries, Unavailable
from trainer.formats.nvml import NvmlMonitor

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
    real_uuids = tuple(gpu.uuid for gpu in monitor.devices())
    monitor.close()
    return real_uuids


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


def test_samples_come_in_order_once(sampler, uuids):
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
            sample.utilisation is None or 0 <= sample.utilisation <= 1
            for sample in second[uuid].samples
        )
        windows = first[uuid].gpm + second[uuid].gpm
        assert windows or second[uuid].gpm_lacking
        assert all(window.start_s <= window.end_s for window in windows)
        assert all(
            window.end_s <= next_window.start_s
            for window, next_window in itertools.pairwise(windows)
        )
    sampler.stop()
    sampler.stop()


def test_samples_cross_processes_unchanged():
    with started(GpuSampler(UUIDS[:1], program=SCRIPTED)) as sampler:
        sampler.take()
        time.sleep(0.3)
        (series,) = sampler.take().values()
    assert {replace(sample, time_s=0.0, missing=()) for sample in series.samples} == {
        replace(SAMPLE, missing=())
    }
    assert {replace(window, start_s=0.0, end_s=0.0) for window in series.gpm} == {
        GPM_WINDOW
    }


READ = """
import pickle, sys, time
from trainer.formats.gpus import Unavailable
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
    """Return the readings of ten ticks 0.1 s apart, and of windows of 0.5 s."""
    clock = FakeClock()
    readings = []
    ticks = iter(range(10))

    def ended(wait_s):
        clock.sleep(wait_s)
        return next(ticks, None) is None

    monitor = FakeGpuMonitor(
        [FakeGpu(facts=replace(GPU_FACTS, uuid="0"), samples=samples, gpm=gpm)],
        clock=clock,
    )
    sample_gpus(monitor, ["0"], write=readings.append, ended=ended, clock=clock)
    return readings


def test_windows_lie_end_to_end():
    (series,) = series_of(sampled(), {"0": GpuSeries()}).values()
    assert [sample.time_s for sample in series.samples] == pytest.approx(
        [1000 + tick / 10 for tick in range(11)]
    )
    first, second = series.gpm
    assert first.end_s == second.start_s
    assert (first.start_s, first.end_s, second.end_s) == pytest.approx(
        (1000.0, 1000.5, 1001.0)
    )


def test_unavailable_readings_keep_their_reason():
    refused = sampled(
        samples=[Unavailable(reason="no permission")],
        gpm=[Unavailable(reason="no Hopper")],
    )
    series = series_of(refused, {"0": GpuSeries()})
    assert series == {"0": GpuSeries(lacking="no permission", gpm_lacking="no Hopper")}
    assert series_of([], series) == series
    assert series_of([("0", "sample", SAMPLE)], series) == {
        "0": GpuSeries(samples=(SAMPLE,), gpm_lacking="no Hopper")
    }


def test_starts_nothing_without_gpus(no_child_left):
    before = psutil.Process().children()  # of other tests
    with started(GpuSampler([])) as sampler:
        assert psutil.Process().children() == before
        assert sampler.take() == {}


@pytest.mark.parametrize(
    "program",
    [DIES, BREAKS_OFF, DIES_LATE],
    ids=["at once", "within a reading", "after a reading"],
)
def test_dead_process_is_not_started_again(program, no_child_left):
    with started(sampler_of(program)) as sampler:
        if program is DIES_LATE:
            assert sampler.take()["0"].lacking == "asleep"
        assert sampler.take() == both("the process that samples the GPUs has exited")
        sampler.start()
        assert sampler._process is None
        assert sampler.take() == both("the process that samples the GPUs has exited")


@pytest.mark.parametrize(
    ("program", "reads"),
    [(SILENT, False), (HANGS, True)],
    ids=["silent", "after a reading"],
)
def test_hanging_process_is_killed(program, reads, monkeypatch, no_child_left):
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
    ("program", "reads", "code"),
    [(SILENT, False, -9), (ONCE, True, 0)],
    ids=["silent", "listening"],
)
def test_silent_process_is_killed_at_the_end(program, reads, code, no_child_left):
    sampler = sampler_of(program)
    sampler.start()
    process = sampler._process
    if reads:
        sampler.take()
    sampler.stop(grace_s=15 if reads else 0.2)
    assert process.wait(timeout=5) == code


def test_missing_start_is_a_reason(no_child_left):
    assert GpuSampler(["0"]).take() == both("the sampler was not started")


def test_unknown_gpu_is_a_reason(no_child_left):
    with started(GpuSampler(["GPU-none"])) as sampler:
        series = sampler.take()["GPU-none"]
    assert (series.samples, series.gpm) == ((), ())
    assert series.lacking


def test_untaken_readings_are_bounded(monkeypatch):
    monkeypatch.setattr(gpu_sampler, "MOST_READINGS", 3)
    with started(
        sampler_of(READ + "[read() for _ in range(1000)]\nsys.stdin.read()")
    ) as sampler:
        sampler.take()
        time.sleep(0.5)
        assert len(sampler._readings) <= 3
