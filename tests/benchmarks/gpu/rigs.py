"""A rig whose GPU and machine are scripted, for tests of the stages."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.core.hardware import GpmWindow, GpuFacts, GpuSample, GpuSeries, HostFacts, SlurmFacts
from autotune.core.outcome import Outcome
from autotune.core.trial import Trial
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.gpu_sampler import Reading, sample_gpus, series_of
from autotune.measure.nvml import MIN_INTERVAL_S, GpuMonitor
from autotune.search.site import Site
from benchmarks.corpora import synthetic_manifest
from benchmarks.gpu.check.rig import Rig
from benchmarks.gpu.check.sizes import TINY_ON_CPU, Sizes
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeHost, FakeMachine


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
    """Samples scripted GPUs as the real sampler does, with a thread in place of its process."""

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str], gpm_window_s: float) -> None:
        self._arguments = (monitor, list(uuids), MIN_INTERVAL_S, gpm_window_s)
        self._last = {uuid: GpuSeries() for uuid in uuids}
        self._readings: list[Reading] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the thread."""
        if self._last and not self._threads:
            self._threads.append(threading.Thread(target=self._sample))
            self._threads[-1].start()

    def take(self) -> dict[str, GpuSeries]:
        """Return what came since the last call."""
        while self._threads and not self._readings:
            time.sleep(0.01)
        taken, self._readings = self._readings, []
        self._last = series_of(taken, self._last)
        return self._last

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        while self._threads:
            self._threads.pop().join()

    def _sample(self) -> None:
        def write(reading: Reading) -> None:
            self._readings.append(reading)

        sample_gpus(*self._arguments, write=write, ended=self._ended.wait, clock=SystemClock())


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
