"""One suite for every GPU monitor: scripted, NVML over simulated bindings, and NVML over a real driver."""

from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from autotune.core.hardware import GpmWindow, GpuFacts, GpuProcess, GpuSample, Unavailable
from autotune.measure.clock import SystemClock
from autotune.measure.nvml import NvmlMonitor
from tests.fakes import FakeClock, FakeGpu, FakeGpuMonitor

GIB = 2**30
FACTS = GpuFacts(
    uuid="GPU-one",
    index=0,
    name="Card",
    total_bytes=80 * GIB,
    mig_enabled=False,
    power_cap_w=350.0,
    compute_mode="default",
    driver="550.1",
    compute_capability=(9, 0),
)
SAMPLE = GpuSample(
    time_s=0.0,
    utilisation=0.75,
    used_bytes=3 * GIB,
    power_w=312.5,
    sm_clock_mhz=1700,
    throttle_reasons=("sw_power_cap",),
    temperature_c=61,
    process_count=1,
    energy_j=5000.5,
)
GPM = GpmWindow(
    start_s=0.0,
    end_s=0.0,
    sm_utilisation=0.9,
    sm_occupancy=0.5,
    tensor_active=0.4,
    dram_active=0.3,
    pcie_rx_bytes_per_s=3.0 * 2**20,
)
PERCENT_AND_MIB_PER_S = {2: 90.0, 3: 50.0, 5: 40.0, 10: 30.0, 21: 3.0}


class SimulatedNvml(ModuleType):
    """The real bindings' constants, errors and structures, over a card that is made up."""

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.__dict__.update(vars(pynvml))
        self.calls = []
        self.live_samples = 0
        card = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": "GPU-one",
            "nvmlDeviceGetName": "Card",
            "nvmlSystemGetDriverVersion": "550.1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=3 * GIB, free=77 * GIB),
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
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=42, usedGpuMemory=2 * GIB)],
            "nvmlDeviceGetP2PStatus": 0,
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleGet": None,
            "nvmlGpmSampleAlloc": self._alloc,
            "nvmlGpmSampleFree": self._free,
            "nvmlGpmMetricsGet": self._metrics,
        }
        for name, answer in (card | answers).items():
            setattr(self, name, self._function(name, answer))

    def _function(self, name, answer):
        def call(*arguments):
            self.calls.append(name)
            value = answer(*arguments) if callable(answer) else answer
            if isinstance(value, int) and name in failing:
                raise pynvml.NVMLError(value)
            return value

        failing = {name} if isinstance(answer, Failing) else set()
        return call

    def _alloc(self):
        self.live_samples += 1
        return pynvml.c_nvmlGpmSample_t()

    def _free(self, _sample):
        self.live_samples -= 1

    def _metrics(self, request):
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for slot in range(request.numMetrics):
            request.metrics[slot].value = PERCENT_AND_MIB_PER_S[request.metrics[slot].metricId]
        return request


class Failing(int):
    """An answer that is NVML's refusal with this code."""


def scripted(clock):
    users = (GpuProcess(pid=42, used_bytes=2 * GIB),)
    gpu = FakeGpu(
        facts=FACTS,
        used_bytes=[3 * GIB],
        samples=[SAMPLE],
        processes=[users],
        gpm=[GPM],
    )
    return FakeGpuMonitor([gpu], clock=clock)


def simulated(clock, **answers):
    return NvmlMonitor(pynvml=SimulatedNvml(**answers), clock=clock)


@pytest.fixture(params=["scripted", "simulated", "hardware"])
def clock(request):
    return SystemClock() if request.param == "hardware" else FakeClock()


@pytest.fixture
def monitor(request, clock):
    kind = request.node.callspec.params["clock"]
    made = {"scripted": scripted, "simulated": simulated}.get(kind, lambda clock: NvmlMonitor(clock=clock))(clock)
    if kind == "hardware" and made.why_absent():
        pytest.skip(f"needs an NVIDIA GPU: {made.why_absent()}")  # no CI machine of this project has one
    yield made
    made.close()


@pytest.fixture
def uuid(monitor):
    return monitor.devices()[0].uuid


def test_devices_are_described_and_distinct(monitor):
    devices = monitor.devices()
    assert monitor.why_absent() is None
    assert len({gpu.uuid for gpu in devices}) == len(devices) > 0
    assert all(gpu.total_bytes > 0 and gpu.name and gpu.driver for gpu in devices)


def test_used_memory_is_part_of_the_total(monitor, uuid):
    assert 0 <= monitor.used_bytes(uuid) <= monitor.devices()[0].total_bytes


def test_samples_carry_rising_times_and_shares(monitor, uuid, clock):
    first = monitor.sample(uuid)
    clock.sleep(0.125)
    second = monitor.sample(uuid)
    assert second.time_s - first.time_s >= 0.125
    assert second.utilisation is None or 0 <= second.utilisation <= 1
    assert second.process_count is None or second.process_count >= 0


def test_processes_are_a_tuple_of_ids(monitor, uuid):
    assert all(process.pid > 0 for process in monitor.compute_processes(uuid))


def test_nvlink_is_told_of_a_pair_or_it_is_said_why_not(monitor):
    one, *others = [gpu.uuid for gpu in monitor.devices()]
    for other in others or [one]:
        linked = monitor.nvlinked(one, other)
        assert isinstance(linked, bool) or linked.reason
    assert isinstance(monitor.nvlinked(one, "GPU-none"), Unavailable)
    assert isinstance(monitor.nvlinked("GPU-none", one), Unavailable)
    monitor.close()
    assert isinstance(monitor.nvlinked(one, one), Unavailable)


@pytest.mark.parametrize(("status", "linked"), [(pynvml.NVML_P2P_STATUS_OK, True), (5, False)])
def test_nvml_tells_of_each_pair_whether_it_is_linked(status, linked):
    def two(handle):
        return f"GPU-{handle}"

    monitor = simulated(
        None,
        nvmlDeviceGetCount=2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=two,
        nvmlDeviceGetP2PStatus=lambda one, other, what: status,
    )
    assert monitor.nvlinked("GPU-0", "GPU-1") is linked
    refused = Failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert "Not Supported" in simulated(None, nvmlDeviceGetP2PStatus=refused).nvlinked("GPU-one", "GPU-one").reason


def test_gpm_window_spans_two_calls_or_says_why_not(monitor, uuid, clock):
    assert isinstance(monitor.gpm(uuid), Unavailable)
    clock.sleep(0.25)
    window = monitor.gpm(uuid)
    if isinstance(window, Unavailable):
        assert window.reason
    else:
        assert window.end_s - window.start_s >= 0.25
        assert window.sm_utilisation is None or 0 <= window.sm_utilisation <= 1


def test_unknown_gpu_is_unavailable_everywhere(monitor):
    asked = [monitor.used_bytes, monitor.sample, monitor.compute_processes, monitor.gpm, monitor.gpm]
    assert all(isinstance(ask("GPU-none"), Unavailable) for ask in asked)


def test_closed_monitor_is_unavailable_and_closes_twice(monitor, uuid):
    monitor.close()
    monitor.close()
    assert isinstance(monitor.used_bytes(uuid), Unavailable)
    assert isinstance(monitor.sample(uuid), Unavailable)
    assert isinstance(monitor.gpm(uuid), Unavailable)


@pytest.mark.parametrize(
    "make",
    [FakeGpuMonitor, lambda: NvmlMonitor(pynvml=SimulatedNvml(nvmlDeviceGetCount=0))],
    ids=["scripted", "simulated"],
)
def test_without_gpus_there_is_a_reason(make):
    monitor = make()
    assert monitor.devices() == ()
    assert monitor.why_absent()
    assert isinstance(monitor.sample("GPU-one"), Unavailable)


def test_scripted_and_simulated_describe_the_same_card():
    clock = FakeClock()
    one, other = scripted(clock), simulated(clock)
    assert one.devices() == other.devices() == (FACTS,)
    assert one.sample("GPU-one") == other.sample("GPU-one")
    assert one.compute_processes("GPU-one") == other.compute_processes("GPU-one")
    windows = []
    for monitor in (one, other):
        monitor.gpm("GPU-one")
        clock.sleep(1)
        windows.append(monitor.gpm("GPU-one"))
    assert windows[1].end_s - windows[1].start_s == 1
    for field in ("sm_utilisation", "sm_occupancy", "tensor_active", "dram_active", "pcie_rx_bytes_per_s"):
        assert getattr(windows[1], field) == pytest.approx(getattr(windows[0], field))


def errors():
    names = [name for name in vars(pynvml) if name.startswith("NVML_ERROR_")]
    return sorted(names, key=lambda name: getattr(pynvml, name))


@pytest.mark.parametrize("name", errors())
def test_every_nvml_error_becomes_a_reason(name):
    refusal = Failing(getattr(pynvml, name))
    assert simulated(None, nvmlInit=refusal).why_absent()
    monitor = simulated(None, nvmlDeviceGetMemoryInfo=lambda _: SimulatedNvml()._function("x", refusal)())
    assert monitor.devices() == ()
    assert monitor.unreadable()[0].startswith("GPU 0: ")
    assert monitor.why_absent() == monitor.unreadable()[0]
    hidden = simulated(None, nvmlDeviceGetComputeRunningProcesses=refusal).compute_processes("GPU-one")
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
def test_one_figure_that_is_not_supported_is_none_alone(function, field):
    sample = simulated(None, **{function: Failing(pynvml.NVML_ERROR_NOT_SUPPORTED)}).sample("GPU-one")
    assert getattr(sample, field) is None
    assert sample.used_bytes == 3 * GIB


def test_lost_gpu_is_unavailable_rather_than_a_sample_of_nothing():
    lost = Failing(pynvml.NVML_ERROR_GPU_IS_LOST)
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings)
    for name in [name for name in vars(bindings) if name.startswith("nvmlDeviceGet")]:
        setattr(bindings, name, bindings._function(name, lost))
    assert "GPU is lost" in monitor.sample("GPU-one").reason


def test_old_driver_is_asked_for_throttle_reasons_by_their_old_name():
    unknown = Failing(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    answers = {
        "nvmlDeviceGetCurrentClocksEventReasons": unknown,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20 | 0x4,
    }
    assert simulated(None, **answers).sample("GPU-one").throttle_reasons == ("sw_power_cap", "sw_thermal")


def test_names_as_bytes_and_missing_optional_facts_are_read():
    refused = Failing(pynvml.NVML_ERROR_NO_PERMISSION)
    (gpu,) = simulated(
        None,
        nvmlDeviceGetName=b"Card",
        nvmlDeviceGetMigMode=refused,
        nvmlDeviceGetEnforcedPowerLimit=refused,
        nvmlDeviceGetComputeMode=refused,
        nvmlDeviceGetCudaComputeCapability=refused,
    ).devices()
    assert gpu.name == "Card"
    assert (gpu.mig_enabled, gpu.power_cap_w, gpu.compute_mode, gpu.compute_capability) == (None, None, None, None)


def test_mig_slices_are_found_by_uuid():
    def slice_of(_, slot):
        if slot == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"slice{slot}"

    (gpu,) = simulated(
        None,
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=3,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
        nvmlDeviceGetUUID=lambda handle: "GPU-one" if handle == "handle" else f"MIG-{handle}",
    ).devices()
    assert gpu.mig_enabled is True
    assert gpu.mig_uuids == ("MIG-slice0", "MIG-slice2")


def test_one_unreadable_gpu_does_not_hide_the_other():
    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "handle"

    monitor = simulated(None, nvmlDeviceGetCount=2, nvmlDeviceGetHandleByIndex=handle)
    assert [gpu.index for gpu in monitor.devices()] == [1]
    assert monitor.unreadable() == ("GPU 0: NVML: GPU is lost",)
    assert monitor.why_absent() is None


def test_process_without_a_known_size_keeps_none():
    listed = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    monitor = simulated(None, nvmlDeviceGetComputeRunningProcesses=listed)
    assert monitor.compute_processes("GPU-one") == (GpuProcess(pid=7, used_bytes=None),)


def test_only_processes_that_hold_memory_to_compute_are_counted():
    listed = [
        SimpleNamespace(pid=7, usedGpuMemory=None),
        SimpleNamespace(pid=8, usedGpuMemory=2**20),
        SimpleNamespace(pid=9, usedGpuMemory=2**29),
    ]
    assert simulated(None, nvmlDeviceGetComputeRunningProcesses=listed).sample("GPU-one").process_count == 1
    assert simulated(None, nvmlDeviceGetComputeRunningProcesses=[]).sample("GPU-one").process_count == 0


def test_nvml_is_shut_down_once():
    bindings = SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings)
    monitor.close()
    monitor.close()
    assert bindings.calls.count("nvmlShutdown") == 1


@pytest.mark.parametrize("fault", [None, "too short", "refused"])
def test_gpm_samples_are_freed_but_the_last(fault):
    clock, bindings = FakeClock(), SimulatedNvml()
    monitor = NvmlMonitor(pynvml=bindings, clock=clock)
    assert "only begun" in monitor.gpm("GPU-one").reason
    clock.sleep(0.01 if fault == "too short" else 1)
    metrics = bindings.nvmlGpmMetricsGet
    if fault == "refused":
        bindings.nvmlGpmMetricsGet = bindings._function("x", Failing(pynvml.NVML_ERROR_UNKNOWN))
    assert isinstance(monitor.gpm("GPU-one"), GpmWindow if fault is None else Unavailable)
    assert bindings.live_samples == 1
    bindings.nvmlGpmMetricsGet = metrics
    clock.sleep(1)
    window = monitor.gpm("GPU-one")
    assert window.end_s - window.start_s == pytest.approx(1.01 if fault == "too short" else 1)
    assert bindings.live_samples == 1


def test_gpm_sample_that_the_driver_refuses_is_freed_and_named():
    bindings = SimulatedNvml(nvmlGpmSampleGet=Failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert "Not Supported" in NvmlMonitor(pynvml=bindings).gpm("GPU-one").reason
    assert bindings.live_samples == 0


def test_card_without_gpm_says_so():
    unsupported = SimpleNamespace(isSupportedDevice=0)
    assert "Hopper" in simulated(None, nvmlGpmQueryDeviceSupport=unsupported).gpm("GPU-one").reason


def test_single_gpm_metric_that_fails_is_none_alone():
    clock, bindings = FakeClock(), SimulatedNvml()
    whole = bindings.nvmlGpmMetricsGet

    def partly(request):
        whole(request)
        request.metrics[2].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        request.metrics[3].value = float("nan")
        return request

    bindings.nvmlGpmMetricsGet = partly
    monitor = NvmlMonitor(pynvml=bindings, clock=clock)
    monitor.gpm("GPU-one")
    clock.sleep(1)
    window = monitor.gpm("GPU-one")
    assert (window.tensor_active, window.dram_active) == (None, None)
    assert window.sm_utilisation == pytest.approx(0.9)
