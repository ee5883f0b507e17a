"""One suite for every GPU monitor: scripted, simulated bindings, and a real driver."""

import ctypes
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest

from autotune.base.clock import SystemClock
from testbed.fakes import (
    GPM_WINDOW,
    GPU_FACTS,
    SAMPLE,
    FakeClock,
    FakeGpu,
    FakeGpuMonitor,
)
from trainer.formats.gpus import GpmWindow, GpuProcess, Unavailable
from trainer.formats.nvml import NvmlMonitor

GIB = 2**30
SYSTEM_CLOCK = SystemClock()
PERCENT_AND_MIB_PER_S = {2: 90.0, 3: 50.0, 5: 40.0, 10: 30.0, 21: 3.0}


class SimulatedNvml(ModuleType):
    """The real bindings' constants, errors and structures, over an invented GPU."""

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.__dict__.update(vars(pynvml))
        self.live_samples = 0
        gpu_model = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": "GPU-0",
            "nvmlDeviceGetName": "GpuModel",
            "nvmlSystemGetDriverVersion": "550.1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(
                total=80 * GIB, used=3 * GIB, free=77 * GIB
            ),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetEnforcedPowerLimit": 350_000,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetPowerUsage": 312_500,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
            "nvmlDeviceGetClockInfo": 1700,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=42, usedGpuMemory=2 * GIB)
            ],
            "nvmlDeviceGetP2PStatus": 0,
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleGet": None,
            "nvmlGpmSampleAlloc": self._alloc,
            "nvmlGpmSampleFree": self._free,
            "nvmlGpmMetricsGet": self._metrics,
        }
        for name, answer in (gpu_model | answers).items():
            does = answer if callable(answer) or isinstance(answer, Exception) else None
            setattr(self, name, Mock(side_effect=does, return_value=answer))

    def _alloc(self):
        self.live_samples += 1
        return pynvml.c_nvmlGpmSample_t()

    def _free(self, _sample):
        self.live_samples -= 1

    def _metrics(self, request):
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for slot in range(request.numMetrics):
            request.metrics[slot].value = PERCENT_AND_MIB_PER_S[
                request.metrics[slot].metricId
            ]
        return request


def scripted(clock):
    users = (GpuProcess(pid=42, used_bytes=2 * GIB),)
    gpu = FakeGpu(
        used_bytes=[3 * GIB],
        samples=[SAMPLE],
        processes=[users],
        gpm=[GPM_WINDOW],
        nvlinked=["GPU-0"],
    )
    return FakeGpuMonitor([gpu], clock=clock)


def simulated(clock=SYSTEM_CLOCK, **answers):
    bindings = SimulatedNvml(**answers)
    return NvmlMonitor(pynvml=bindings, monotonic_s=clock.monotonic_s)


@pytest.fixture(params=["scripted", "simulated", "hardware"])
def clock(request):
    return SystemClock() if request.param == "hardware" else FakeClock()


@pytest.fixture
def monitor(request, clock):
    kind = request.node.callspec.params["clock"]
    made = {"scripted": scripted, "simulated": simulated}.get(
        kind, lambda clock: NvmlMonitor()
    )(clock)
    if kind == "hardware" and made.why_absent():
        # No CI machine of this project has one.
        pytest.skip(f"needs an NVIDIA GPU: {made.why_absent()}")
    yield made
    made.close()


@pytest.fixture
def uuid(monitor):
    return monitor.devices()[0].uuid


def test_readings_are_possible(monitor, uuid, clock):
    devices = monitor.devices()
    assert monitor.why_absent() is None
    assert len({gpu.uuid for gpu in devices}) == len(devices) > 0
    assert all(gpu.total_bytes > 0 and gpu.name and gpu.driver for gpu in devices)
    assert 0 <= monitor.used_bytes(uuid) <= devices[0].total_bytes
    assert all(process.pid > 0 for process in monitor.compute_processes(uuid))
    first = monitor.sample(uuid)
    clock.sleep(0.125)
    second = monitor.sample(uuid)
    assert second.time_s - first.time_s >= 0.125
    assert second.utilisation is None or 0 <= second.utilisation <= 1
    assert second.process_count is None or second.process_count >= 0


def test_nvlink_is_known_or_explained(monitor):
    first, *other_uuids = [gpu.uuid for gpu in monitor.devices()]
    for second in other_uuids or [first]:
        linked = monitor.nvlinked(first, second)
        assert isinstance(linked, bool) or linked.reason
    assert isinstance(monitor.nvlinked(first, "GPU-none"), Unavailable)
    assert isinstance(monitor.nvlinked("GPU-none", first), Unavailable)


def test_nvml_knows_linked_pairs():
    for status, linked in ((pynvml.NVML_P2P_STATUS_OK, True), (5, False)):
        assert (
            simulated(nvmlDeviceGetP2PStatus=status).nvlinked("GPU-0", "GPU-0")
            is linked
        )


def test_unsupported_nvlink_has_its_reason():
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert (
        "Not Supported"
        in simulated(nvmlDeviceGetP2PStatus=refused).nvlinked("GPU-0", "GPU-0").reason
    )


def test_gpm_window_spans_two_calls(monitor, uuid, clock):
    assert isinstance(monitor.gpm(uuid), Unavailable)
    clock.sleep(0.25)
    window = monitor.gpm(uuid)
    assert (
        window.reason
        if isinstance(window, Unavailable)
        else window.end_s - window.start_s >= 0.25
    )
    utilisation = getattr(window, "sm_utilisation", None)
    assert utilisation is None or 0 <= utilisation <= 1


def test_unknown_gpu_is_unavailable(monitor, uuid):
    def answers(uuid):
        calls = (
            monitor.used_bytes,
            monitor.sample,
            monitor.compute_processes,
            monitor.gpm,
        )
        return [monitor.nvlinked(uuid, uuid), *(call(uuid) for call in calls)]

    assert all(isinstance(answer, Unavailable) for answer in answers("GPU-none"))
    monitor.close()
    monitor.close()
    assert all(isinstance(answer, Unavailable) for answer in answers(uuid))


@pytest.mark.parametrize(
    "make",
    [FakeGpuMonitor, partial(simulated, nvmlDeviceGetCount=0)],
    ids=["scripted", "simulated"],
)
def test_missing_gpus_have_a_reason(make):
    monitor = make()
    assert monitor.devices() == ()
    assert monitor.why_absent()
    assert isinstance(monitor.sample("GPU-0"), Unavailable)


def test_scripted_matches_simulated():
    clock = FakeClock()
    script = scripted(clock)
    simulation = simulated(clock)
    assert script.devices() == simulation.devices() == (GPU_FACTS,)
    assert script.sample("GPU-0") == simulation.sample("GPU-0")
    assert script.compute_processes("GPU-0") == simulation.compute_processes("GPU-0")
    for monitor in (script, simulation):
        monitor.gpm("GPU-0")
        clock.sleep(1)
        window = monitor.gpm("GPU-0")
        assert astuple(window)[2:] == pytest.approx(astuple(GPM_WINDOW)[2:])
        assert window.end_s - window.start_s == 1


@pytest.mark.parametrize(
    "name", sorted(name for name in vars(pynvml) if name.startswith("NVML_ERROR_"))
)
def test_every_nvml_error_becomes_a_reason(name):
    refusal = pynvml.NVMLError(getattr(pynvml, name))
    assert simulated(nvmlInit=refusal).why_absent()
    monitor = simulated(nvmlDeviceGetMemoryInfo=refusal)
    assert monitor.devices() == ()
    assert monitor.unreadable()[0].startswith("GPU 0: ")
    assert monitor.why_absent() == monitor.unreadable()[0]
    hidden = simulated(nvmlDeviceGetComputeRunningProcesses=refusal).compute_processes(
        "GPU-0"
    )
    assert isinstance(hidden, Unavailable)
    assert hidden.reason


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetComputeRunningProcesses", "process_count"),
    ],
)
def test_unsupported_figure_is_none_alone(function, field):
    sample = simulated(
        **{function: pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)}
    ).sample("GPU-0")
    assert (getattr(sample, field), sample.used_bytes) == (None, 3 * GIB)


def test_lost_gpu_is_unavailable():
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings)
    for name in [name for name in vars(bindings) if name.startswith("nvmlDeviceGet")]:
        setattr(
            bindings,
            name,
            Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)),
        )
    assert "GPU is lost" in monitor.sample("GPU-0").reason


def test_shuts_nvml_down_once():
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings)
    monitor.close()
    monitor.close()
    bindings.nvmlShutdown.assert_called_once()


def test_old_driver_uses_old_throttle_name():
    unknown = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    reasons = 0x20 | 0x4
    old = simulated(
        nvmlDeviceGetCurrentClocksEventReasons=unknown,
        nvmlDeviceGetCurrentClocksThrottleReasons=reasons,
    )
    assert old.sample("GPU-0").throttle_reasons == ("sw_power_cap", "sw_thermal")


def test_missing_optional_facts_are_none():
    optional = ("MigMode", "EnforcedPowerLimit", "ComputeMode", "CudaComputeCapability")
    refused = {
        f"nvmlDeviceGet{name}": pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        for name in optional
    }
    (gpu,) = simulated(**refused).devices()
    assert (
        gpu.mig_enabled,
        gpu.power_cap_w,
        gpu.compute_mode,
        gpu.compute_capability,
    ) == (None, None, None, None)


def test_finds_mig_slices_by_uuid():
    empty = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    (gpu,) = simulated(
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=3,
        nvmlDeviceGetMigDeviceHandleByIndex=Mock(
            side_effect=["slice0", empty, "slice2"]
        ),
        nvmlDeviceGetUUID=lambda handle: (
            "GPU-0" if handle == "handle" else f"MIG-{handle}"
        ),
    ).devices()
    assert gpu.mig_enabled is True
    assert gpu.mig_uuids == ("MIG-slice0", "MIG-slice2")


def test_unreadable_gpu_does_not_hide_others():
    handles = Mock(
        side_effect=[pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST), "handle"]
    )
    monitor = simulated(nvmlDeviceGetCount=2, nvmlDeviceGetHandleByIndex=handles)
    assert [gpu.index for gpu in monitor.devices()] == [1]
    assert monitor.unreadable() == ("GPU 0: NVML: GPU is lost",)
    assert monitor.why_absent() is None


def test_counts_only_processes_holding_memory():
    listed = [
        SimpleNamespace(pid=pid, usedGpuMemory=used)
        for pid, used in ((7, None), (8, 2**20), (9, 2**29))
    ]
    monitor = simulated(nvmlDeviceGetComputeRunningProcesses=listed)
    assert monitor.sample("GPU-0").process_count == 1
    assert monitor.compute_processes("GPU-0")[0] == GpuProcess(pid=7, used_bytes=None)
    assert (
        simulated(nvmlDeviceGetComputeRunningProcesses=[]).sample("GPU-0").process_count
        == 0
    )


@pytest.mark.parametrize("fault", [None, "too short", "refused"])
def test_frees_all_samples_but_the_last(fault):
    clock = FakeClock()
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings, monotonic_s=clock.monotonic_s)
    assert "just started" in monitor.gpm("GPU-0").reason
    clock.sleep(0.01 if fault == "too short" else 1)
    if fault == "refused":
        bindings.nvmlGpmMetricsGet.side_effect = pynvml.NVMLError(
            pynvml.NVML_ERROR_UNKNOWN
        )
    assert isinstance(monitor.gpm("GPU-0"), GpmWindow if fault is None else Unavailable)
    assert bindings.live_samples == 1
    bindings.nvmlGpmMetricsGet.side_effect = bindings._metrics
    clock.sleep(1)
    window = monitor.gpm("GPU-0")
    assert window.end_s - window.start_s == pytest.approx(
        1.01 if fault == "too short" else 1
    )
    assert bindings.live_samples == 1


def test_refused_counters_have_their_reason():
    bindings = SimulatedNvml(
        nvmlGpmSampleGet=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    )
    assert "Not Supported" in NvmlMonitor(pynvml=bindings).gpm("GPU-0").reason
    assert bindings.live_samples == 0


def test_gpu_without_counters_has_its_reason():
    assert (
        "Hopper"
        in simulated(nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=0))
        .gpm("GPU-0")
        .reason
    )


def test_failed_metric_is_none_alone():
    def partly(request):
        SimulatedNvml()._metrics(request)
        request.metrics[2].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        request.metrics[3].value = float("nan")
        return request

    clock = FakeClock()
    monitor = simulated(clock, nvmlGpmMetricsGet=partly)
    monitor.gpm("GPU-0")
    clock.sleep(1)
    window = monitor.gpm("GPU-0")
    assert (window.tensor_active, window.dram_active, window.sm_utilisation) == (
        None,
        None,
        pytest.approx(0.9),
    )


def test_missing_driver_library_has_its_reason():
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        monitor = NvmlMonitor()
    else:
        pytest.skip("this machine has the driver's library")
    assert (monitor.devices(), monitor.unreadable()) == ((), ())
    assert "no NVIDIA driver installed" in monitor.why_absent()
    assert monitor.used_bytes("GPU-x") == Unavailable(reason=monitor.why_absent())
    monitor.close()


def test_figures_that_are_not_wanted_are_not_read():
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings)
    sample = monitor.sample("GPU-0", {"utilisation", "power_w"})
    assert (sample.utilisation, sample.power_w) == (0.75, 312.5)
    assert (sample.process_count, sample.temperature_c, sample.missing) == (
        None,
        None,
        {},
    )
    bindings.nvmlDeviceGetComputeRunningProcesses.assert_not_called()


def test_driver_version_needs_no_readable_gpu():
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    monitor = simulated(nvmlDeviceGetHandleByIndex=lost)
    assert monitor.devices() == ()
    assert monitor.driver_version() == "550.1"


def test_driver_version_may_be_unavailable():
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    unknown = simulated(nvmlSystemGetDriverVersion=refused)
    assert isinstance(unknown.driver_version(), Unavailable)
    assert isinstance(simulated(nvmlInit=refused).driver_version(), Unavailable)


def test_missing_bindings_have_their_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    monitor = NvmlMonitor()
    assert monitor.why_absent() == "the package nvidia-ml-py is not installed"
    assert monitor.driver_version() == Unavailable(reason=monitor.why_absent())
    monitor.close()


def test_driver_is_called_by_one_thread_at_a_time():
    """Concurrent calls have crashed drivers."""
    callers, at_once = set(), []
    running = threading.Semaphore(1)

    def slow_power(_handle):
        at_once.append(not running.acquire(blocking=False))
        callers.add(threading.get_ident())
        time.sleep(0.01)
        running.release()
        return 1000

    monitor = simulated(nvmlDeviceGetPowerUsage=slow_power)
    with ThreadPoolExecutor(4) as pool:
        samples = list(pool.map(lambda _: monitor.sample("GPU-0", {"power_w"}), "abcd"))
    assert [sample.power_w for sample in samples] == [1.0] * 4
    assert at_once == [False] * 4
    assert len(callers) == 1


def test_forked_process_calls_the_driver_too():
    monitor = simulated()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=lambda: sender.send(monitor.sample("GPU-0").utilisation)
    )
    child.start()
    assert receiver.poll(60)
    assert receiver.recv() == 0.75
    child.join()
