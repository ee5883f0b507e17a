"""What the contract suite cannot show of the processes that sample GPUs: their faults, and their end."""

import subprocess
import sys
import time

import psutil
import pytest

from autotune.core.hardware import GpuSeries
from autotune.measure import gpu_sampler
from autotune.measure.gpu_sampler import GpuSampler, sampling_command

ANSWERS_ONCE = """
import json, sys
sys.stdin.readline()
print(json.dumps({"samples": [], "gpm": [], "lacking": "asleep", "gpm_lacking": None}), flush=True)
"""
HANGS = "import sys, time\nfor line in sys.stdin: time.sleep(60)"
DIES = "raise SystemExit(3)"
BREAKS_OFF = """
import sys
sys.stdin.readline()
sys.stdout.write('{"samples": [')
"""
DEAF = "import time\ntime.sleep(60)"


def sampler_of(*programs: str) -> GpuSampler:
    """A sampler whose GPUs are sampled by these programs; the GPUs are named by their number."""
    numbered = dict(zip(map(str, range(len(programs))), programs, strict=True))
    return GpuSampler(list(numbered), command=lambda uuid, *_: [sys.executable, "-c", numbered[uuid]])


@pytest.fixture
def no_child_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in after if child.status() != psutil.STATUS_ZOMBIE] == []


def test_process_of_a_gpu_is_started_with_its_uuid_and_times():
    command = sampling_command("GPU-1", 0.1, 0.5)
    assert command[1:] == ["-m", "autotune.measure.gpu_sampling", "GPU-1", "0.1", "0.5"]


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


def test_process_that_died_is_a_reason_and_not_an_error(no_child_left):
    with sampler_of(DIES) as sampler:
        for process in sampler._processes.values():
            process.wait()
        expected = GpuSeries(
            lacking="the process that samples the GPU has ended",
            gpm_lacking="the process that samples the GPU has ended",
        )
        assert sampler.take() == {"0": expected}
        assert sampler.take() == {"0": expected}


def test_process_that_dies_after_an_answer_is_a_reason_from_then_on(no_child_left):
    with sampler_of(ANSWERS_ONCE) as sampler:
        assert sampler.take()["0"].lacking == "asleep"
        assert "has ended" in sampler.take()["0"].lacking


def test_answer_that_breaks_off_is_a_reason_and_not_an_error(no_child_left):
    with sampler_of(BREAKS_OFF) as sampler:
        assert "has ended" in sampler.take()["0"].lacking


def test_process_that_hangs_is_killed_and_the_others_still_answer(monkeypatch, no_child_left):
    monkeypatch.setattr(gpu_sampler, "START_WITHIN_S", 1.0)
    with sampler_of(HANGS, ANSWERS_ONCE) as sampler:
        hung = sampler._processes["0"]
        started_s = time.monotonic()
        found = sampler.take()
        assert time.monotonic() - started_s < 5
        assert found["0"].lacking == "the process that samples the GPU has not answered for 1 s"
        assert found["1"].lacking == "asleep"
        assert hung.poll() is not None


def test_process_that_was_lost_is_not_started_again(no_child_left):
    with sampler_of(DIES) as sampler:
        sampler._processes["0"].wait()
        sampler.take()
        sampler.start()
        assert sampler._processes == {}


def test_process_that_does_not_hear_the_end_is_killed(monkeypatch, no_child_left):
    waits = []
    wait = subprocess.Popen.wait

    def impatient(self, timeout=None):
        waits.append(timeout)
        return wait(self, timeout=None if timeout is None else 0.2)

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    sampler = sampler_of(DEAF)
    sampler.start()
    (process,) = sampler._processes.values()
    sampler.stop()
    wait(process, timeout=5)
    assert process.returncode == -9
    assert waits


def test_sampler_that_was_not_started_says_so():
    assert GpuSampler(["GPU-1"]).take() == {
        "GPU-1": GpuSeries(lacking="the sampler was not started", gpm_lacking="the sampler was not started")
    }


def test_without_a_driver_the_real_process_gives_its_reason(no_child_left):
    with GpuSampler(["GPU-none"]) as sampler:
        series = sampler.take()["GPU-none"]
    assert series.samples == ()
    assert series.gpm == ()
    assert series.lacking
