"""A rig whose GPU and machine are scripted, for tests of the stages."""

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.core.hardware import GpmWindow, GpuFacts, GpuSample, GpuSeries, HostFacts, SlurmFacts
from autotune.core.outcome import Outcome
from autotune.core.trial import Trial
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.gpm import MIN_INTERVAL_S
from autotune.measure.gpu_sampling import Sampling, series_from_json, serve
from autotune.measure.host import FakeHost
from autotune.measure.machine import FakeMachine
from autotune.measure.nvml import FakeGpu, FakeGpuMonitor, GpuMonitor
from autotune.search.site import Site
from benchmarks.gpu.check.rig import Rig
from benchmarks.gpu.check.sizes import TINY_ON_CPU, Sizes
from tests.simulators.corpora import synthetic_manifest


class FakeServer(FakeMachine):
    """A machine that starts at once."""

    def __init__(self, simulate: Callable[[Trial], Outcome]) -> None:
        super().__init__(simulate)
        self.versions: dict[str, str | None] = {"cuda": "13.0"}
        self.closed = False

    def start(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self.closed = True


class ThreadSampler:
    """Samples scripted GPUs as the real sampler does, with a thread in place of each GPU's process."""

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str], gpm_window_s: float) -> None:
        self._monitor, self._uuids, self._gpm_window_s = monitor, uuids, gpm_window_s
        self._pipes: dict[str, int] = {}
        self._answers: dict[str, queue.SimpleQueue[str]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start a thread for each GPU."""
        for uuid in self._uuids:
            if uuid not in self._pipes:
                requests, self._pipes[uuid] = os.pipe()
                self._answers[uuid] = queue.SimpleQueue()
                self._threads.append(threading.Thread(target=self._serve, args=(uuid, requests)))
                self._threads[-1].start()

    def take(self) -> dict[str, GpuSeries]:
        """What came since the last call."""
        for pipe in self._pipes.values():
            os.write(pipe, b"take\n")
        return {uuid: series_from_json(json.loads(answers.get(timeout=10))) for uuid, answers in self._answers.items()}

    def stop(self) -> None:
        """Close the pipes, which ends the threads."""
        while self._pipes:
            os.close(self._pipes.popitem()[1])
        while self._threads:
            self._threads.pop().join()

    def _serve(self, uuid: str, requests: int) -> None:
        sampling = Sampling(self._monitor, uuid, gpm_window_s=self._gpm_window_s, clock=SystemClock())
        serve(sampling, MIN_INTERVAL_S, requests, self._answers[uuid].put)
        os.close(requests)


def facts(total_bytes: int = 143_771 * 2**20) -> GpuFacts:
    return GpuFacts(
        uuid="GPU-1",
        index=0,
        name="NVIDIA Card",
        total_bytes=total_bytes,
        mig_enabled=False,
        power_cap_w=700.0,
        compute_mode="default",
        driver="580.1",
        compute_capability=(9, 0),
    )


SAMPLE = GpuSample(
    time_s=0,
    utilisation=0.75,
    used_bytes=2**30,
    power_w=400.0,
    sm_clock_mhz=1500,
    throttle_reasons=("sw_power_cap",),
    temperature_c=60,
)
WINDOW = GpmWindow(
    start_s=0,
    end_s=0,
    sm_utilisation=0.7,
    sm_occupancy=0.2,
    tensor_active=0.6,
    dram_active=None,
    pcie_rx_bytes_per_s=1e6,
)


def monitor_of(gpu: GpuFacts) -> FakeGpuMonitor:
    return FakeGpuMonitor([FakeGpu(facts=gpu, samples=[SAMPLE], gpm=[WINDOW], used_bytes=[2**29])])


def make_rig(
    tmp_path: Path,
    simulate: Callable[[Trial], Outcome],
    *,
    gpu: GpuFacts | None = None,
    sizes: Sizes = TINY_ON_CPU,
    clock: Clock | None = None,
    data: Path | None = None,
) -> Rig:
    host: HostFacts = FakeHost().facts([tmp_path])
    site = Site(
        device="cuda" if gpu else "cpu",
        gpus=(gpu,) if gpu else (),
        host=host,
        slurm=SlurmFacts(job_id=None, end_time_s=None, nodes=None, tasks=None, gpus_per_node=None, commands=()),
        versions={"torch": "2.11", "transformers": "5.17"},
        gpu_absent=None if gpu else "no GPU here",
        device_used_bytes=2**29 if gpu else None,
    )
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir(parents=True)
    monitor = monitor_of(gpu) if gpu else FakeGpuMonitor([], absent="no GPU here")
    return Rig(
        site=site,
        monitor=monitor,
        make_machine=lambda: FakeServer(simulate),
        make_sampler=lambda uuids, gpm_window_s: ThreadSampler(monitor, uuids, gpm_window_s),
        manifest=synthetic_manifest(sizes.vocab_size),
        sizes=sizes,
        clock=clock or SystemClock(),
        out=out,
        scratch=scratch,
        data=data,
    )
