"""NVIDIA GPUs as a port, through NVML: their description, state and processes.

Every error of NVML is translated here: a missing figure is ``None``, or ``Unavailable``
with NVML's reason. A monitor has one thread that calls the driver: one call at a time,
because concurrent GPM calls have crashed drivers, and in a thread, because a call may
never return. Once one is late, NVML is not called again.
"""

import functools
import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from trainer.formats.gpus import (
    GpmWindow,
    GpuFacts,
    GpuProcess,
    GpuSample,
    Unavailable,
    throttle_names,
)

_COMPUTE_MODES = {
    0: "default",
    1: "exclusive_thread",
    2: "prohibited",
    3: "exclusive_process",
}
_HINTS = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": (
        "no NVIDIA driver installed, or the container was started without it"
    ),
    "NVML_ERROR_DRIVER_NOT_LOADED": (
        "the NVIDIA kernel module is not loaded, or no GPU was allocated"
    ),
    "NVML_ERROR_NO_PERMISSION": "permission denied",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated without a restart",
}

LEAST_CONTEXT_BYTES = 64 * 2**20
"""Least memory of a process that computes: a CUDA context takes hundreds of MiB."""

ANSWER_WITHIN_S = 30.0
"""Timeout of a call: without persistence mode the driver first initialises every GPU,
which takes seconds for each."""

MIN_INTERVAL_S = 0.1
"""Shortest interval between samples, about NVML's own; faster samples show noise."""

# The field that a GPM metric fills, NVML's name for it, and the factor from NVML's unit
# (percent, MiB/s) to ours.
_GPM_METRICS = (
    ("sm_utilisation", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("pcie_rx_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", float(2**20)),
)

T = TypeVar("T")


class GpuMonitor(Protocol):
    """Source of facts about GPUs; GPUs are named by UUID throughout."""

    def devices(self) -> tuple[GpuFacts, ...]:
        """Return all GPUs that could be described, in NVML's order."""

    def unreadable(self) -> tuple[str, ...]:
        """Return one line for each GPU that exists and could not be described."""

    def why_absent(self) -> str | None:
        """Return the reason why ``devices`` is empty; ``None`` if it is not."""

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """Return the device memory in use, by all processes and by the driver."""

    def sample(
        self, uuid: str, figures: Set[str] | None = None
    ) -> GpuSample | Unavailable:
        """Return the GPU's state now.

        Args:
            uuid: UUID of the GPU.
            figures: Names of the figures to read, as each costs a call of the driver;
                the others are None. None reads all.

        Returns:
            The state, or ``Unavailable`` only if nothing at all could be read.
        """

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """Return the processes with a compute context.

        Those of other containers may be hidden.
        """

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """Return True if NVLink connects the two GPUs."""

    def gpm(self, uuid: str) -> GpmWindow | Unavailable:
        """Return hardware counters since the last call for this GPU.

        GPUs have them since Hopper. The first call only starts them.
        """

    def close(self) -> None:
        """Release the driver; afterwards every figure is unavailable."""


class NvmlMonitor:
    """The GPUs of this machine.

    If there are none, no method raises: ``why_absent`` returns the reason.
    """

    def __init__(
        self,
        *,
        pynvml: Any = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mute: str | None = None
        self._nvml = pynvml or _import_pynvml()
        self._monotonic_s = monotonic_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._caller: threading.Thread | None = None
        self._starting = threading.Lock()
        self._handles: dict[str, Any] = {}
        # When each GPU's last GPM sample was taken, and the sample.
        self._counters: dict[str, tuple[float, Any]] = {}
        started: Any = Unavailable(reason="the package nvidia-ml-py is not installed")
        if self._nvml is not None:
            started = self._bounded(self._nvml.nvmlInit)
        self._open = not isinstance(started, Unavailable)
        count = self._bounded(self._nvml.nvmlDeviceGetCount) if self._open else started
        indices = range(0 if isinstance(count, Unavailable) else count)
        described = [
            self._bounded(functools.partial(self._describe, index)) for index in indices
        ]
        self._devices = tuple(
            facts for facts in described if isinstance(facts, GpuFacts)
        )
        lacking = (
            (index, facts)
            for index, facts in enumerate(described)
            if isinstance(facts, Unavailable)
        )
        self._unreadable = tuple(
            f"GPU {index}: {facts.reason}" for index, facts in lacking
        )
        none = "; ".join(self._unreadable) or "the NVIDIA driver reports no GPU"
        reason = count.reason if isinstance(count, Unavailable) else none
        self._absent = None if self._devices else reason

    def devices(self) -> tuple[GpuFacts, ...]:
        """Return the GPUs that were described when the monitor was made."""
        return self._devices

    def unreadable(self) -> tuple[str, ...]:
        """Return the GPUs that the driver could not describe, with its reasons."""
        return self._unreadable

    def why_absent(self) -> str | None:
        """Return the driver's reason, or the permission that is missing."""
        return self._absent

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """Return total minus free, as NVML's first memory interface counts.

        It includes the driver's reserve.
        """
        return self._ask(
            uuid, lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        )

    def sample(
        self, uuid: str, figures: Set[str] | None = None
    ) -> GpuSample | Unavailable:
        """Return one measurement of these figures; each may be missing on its own."""
        time_s = self._monotonic_s()
        figures = SAMPLE_FIGURES if figures is None else figures
        wanted = [
            (names, question)
            for names, question in _QUESTIONS
            if not figures.isdisjoint(names)
        ]
        answers: dict[tuple[str, ...], tuple[Any, ...] | Unavailable] = {}

        def read(nvml: Any, gpu: Any) -> None:
            for names, question in wanted:
                answers[names] = self._try(functools.partial(question, nvml, gpu))

        # All in one turn of the thread that calls the driver. If a call never returns,
        # the answers before it are kept.
        ended = self._ask(uuid, read)
        known: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for names, _ in wanted:
            answer = answers.get(names, ended)
            if isinstance(answer, Unavailable):
                missing |= dict.fromkeys(names, answer.reason)
            elif answer is not None:
                known |= zip(names, answer, strict=True)
        if missing and not known:
            return Unavailable(reason=next(iter(missing.values())))
        return GpuSample(
            time_s=time_s, missing=missing, **dict.fromkeys(SAMPLE_FIGURES) | known
        )

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """Return the processes that the driver lists, with the host's process ids."""
        listed = self._ask(
            uuid, lambda nvml, gpu: list(nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
        )
        if isinstance(listed, Unavailable):
            return listed
        return tuple(
            GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory)
            for process in listed
        )

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """Return True if the driver reports a working NVLink of the pair.

        The link may be a bridge or a switch.
        """
        if other not in self._handles:
            return Unavailable(
                reason=self._absent or f"no readable GPU has the UUID {other}"
            )
        link, to = self._nvml.NVML_P2P_CAPS_INDEX_NVLINK, self._handles[other]
        status = self._ask(
            uuid, lambda nvml, gpu: nvml.nvmlDeviceGetP2PStatus(gpu, to, link)
        )
        return (
            status
            if isinstance(status, Unavailable)
            else bool(status == self._nvml.NVML_P2P_STATUS_OK)
        )

    def gpm(self, uuid: str) -> GpmWindow | Unavailable:
        """Compare the counters with those of the last call.

        A metric that the driver does not report is None.
        """
        return self._ask(uuid, functools.partial(self._counted, uuid))

    def close(self) -> None:
        """Shut NVML down once, which frees its samples; later calls do nothing."""
        if self._open:
            self._open = False
            self._bounded(self._nvml.nvmlShutdown)
        self._calls.put(None)

    def driver_version(self) -> str | Unavailable:
        """Return the version of the driver, which needs no readable GPU."""
        if not self._open:
            return Unavailable(reason=self._absent or "the GPU monitor is closed")
        return self._bounded(lambda: str(self._nvml.nvmlSystemGetDriverVersion()))

    def _counted(self, uuid: str, nvml: Any, gpu: Any) -> GpmWindow | Unavailable:
        before = self._counters.get(uuid)
        if before is None and not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            return Unavailable(
                reason=(
                    "this GPU has no performance monitoring (GPM needs Hopper or later)"
                )
            )
        window_s = math.inf if before is None else self._monotonic_s() - before[0]
        if window_s < MIN_INTERVAL_S:
            return Unavailable(
                reason=(
                    f"a window of {window_s:.3f} s is shorter than {MIN_INTERVAL_S} s"
                ),
                for_now=True,
            )
        sample = nvml.nvmlGpmSampleAlloc()
        try:
            nvml.nvmlGpmSampleGet(gpu, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            raise
        end_s = self._monotonic_s()
        self._counters[uuid] = end_s, sample
        if before is None:
            return Unavailable(
                reason="the first window of counters has just started", for_now=True
            )
        start_s, first = before
        try:
            return GpmWindow(
                start_s=start_s, end_s=end_s, **_gpm_metrics(nvml, first, sample)
            )
        finally:
            nvml.nvmlGpmSampleFree(first)

    def _ask(self, uuid: str, question: Callable[[Any, Any], T]) -> T | Unavailable:
        """Call NVML, and translate its error.

        ``question`` gets the bindings and a device handle.
        """
        if uuid not in self._handles:
            return Unavailable(
                reason=self._absent or f"no readable GPU has the UUID {uuid}"
            )
        if not self._open:
            return Unavailable(reason="the GPU monitor is closed")
        return self._bounded(lambda: question(self._nvml, self._handles[uuid]))

    def _bounded(self, call: Callable[[], T]) -> T | Unavailable:
        """Let the thread that calls the driver make a call, and wait for its answer."""
        if self._mute is not None:
            return Unavailable(reason=self._mute)
        answer: Future[T | Unavailable] = Future()

        def run() -> None:
            try:
                answer.set_result(self._try(call))
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
                answer.set_exception(error)

        self._start_caller()
        self._calls.put(run)
        try:
            return answer.result(timeout=ANSWER_WITHIN_S)
        except TimeoutError:
            self._mute = (
                "NVML does not respond: a call has not returned for"
                f" {ANSWER_WITHIN_S:g} s"
            )
            return Unavailable(reason=self._mute)

    def _start_caller(self) -> None:
        """Start the thread that calls the driver, unless it runs.

        One thread for all calls costs a tenth of a thread for each. A forked process
        has none, and starts its own.
        """
        with self._starting:
            if self._caller is not None and self._caller.is_alive():
                return
            self._calls = queue.SimpleQueue()
            self._caller = threading.Thread(
                target=_make_calls, args=(self._calls,), name="nvml", daemon=True
            )
            self._caller.start()

    def _try(self, call: Callable[[], T]) -> T | Unavailable:
        try:
            return call()
        except self._nvml.NVMLError as error:
            codes = {
                getattr(self._nvml, name, None): hint for name, hint in _HINTS.items()
            }
            hint = codes.get(getattr(error, "value", None))
            message = str(error) if str(error).startswith("NVML") else f"NVML: {error}"
            return Unavailable(reason=f"{message} ({hint})" if hint else message)

    def _describe(self, index: int) -> GpuFacts:
        """Describe one GPU; its identity must be readable, the rest may be missing."""
        nvml = self._nvml
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)

        def optional(call: Callable[..., Any], *arguments: Any) -> Any:
            return _or_none(self._try(functools.partial(call, *arguments)))

        mig = optional(nvml.nvmlDeviceGetMigMode, gpu)
        mode = optional(nvml.nvmlDeviceGetComputeMode, gpu)
        sliced = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
        slots = optional(nvml.nvmlDeviceGetMaxMigDeviceCount, gpu) if sliced else None
        slices = [
            optional(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, slot)
            for slot in range(slots or 0)
        ]
        # Some slots are empty.
        uuids = [
            optional(nvml.nvmlDeviceGetUUID, one) for one in slices if one is not None
        ]
        facts = GpuFacts(
            uuid=nvml.nvmlDeviceGetUUID(gpu),
            index=index,
            name=nvml.nvmlDeviceGetName(gpu),
            total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
            mig_enabled=None if mig is None else sliced,
            power_cap_w=optional(
                lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
            ),
            compute_mode=(
                None if mode is None else _COMPUTE_MODES.get(mode, f"unknown_{mode}")
            ),
            driver=nvml.nvmlSystemGetDriverVersion(),
            compute_capability=optional(
                lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu))
            ),
            mig_uuids=tuple(uuid for uuid in uuids if uuid is not None),
        )
        self._handles[facts.uuid] = gpu
        return facts


def _import_pynvml() -> Any:
    """Return NVML's bindings; None if they are not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _make_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Make the calls of a queue in their order, until it has None."""
    while (call := calls.get()) is not None:
        call()


def _or_none(figure: T | Unavailable) -> T | None:
    return None if isinstance(figure, Unavailable) else figure


def _processes_with_memory(nvml: Any, gpu: Any) -> int:
    """Count processes with a CUDA context.

    Forked DataLoader workers merely hold the device open and do not count.
    """
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return sum(
        (process.usedGpuMemory or 0) >= LEAST_CONTEXT_BYTES for process in listed
    )


def _utilisations(nvml: Any, gpu: Any) -> tuple[float, float]:
    """Return the utilisation of the GPU and of its memory, 0 to 1."""
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return rates.gpu / 100, rates.memory / 100


def _throttle_reasons(nvml: Any, gpu: Any) -> tuple[str, ...]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    # Drivers before 535 know only the old name; if that fails too, its error is the
    # answer.
    except nvml.NVMLError:
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return throttle_names(int(mask))


_QUESTIONS: tuple[
    tuple[tuple[str, ...], Callable[[Any, Any], tuple[Any, ...]]], ...
] = (
    # First, as it is differenced over the sample's time.
    (
        ("energy_j",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,),
    ),
    (("utilisation", "memory_utilisation"), _utilisations),
    (
        ("used_bytes",),
        lambda nvml, gpu: (int(nvml.nvmlDeviceGetMemoryInfo(gpu).used),),
    ),
    (("power_w",), lambda nvml, gpu: (nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,)),
    (
        ("sm_clock_mhz",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),),
    ),
    (("throttle_reasons",), lambda nvml, gpu: (_throttle_reasons(nvml, gpu),)),
    (
        ("temperature_c",),
        lambda nvml, gpu: (
            nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        ),
    ),
    (("process_count",), lambda nvml, gpu: (_processes_with_memory(nvml, gpu),)),
)
"""Figures of a sample, and the call that reads them from NVML's bindings and a device
handle."""

SAMPLE_FIGURES = frozenset(name for names, _ in _QUESTIONS for name in names)
"""Figures of a ``GpuSample``."""


def _gpm_metrics(nvml: Any, first: Any, second: Any) -> dict[str, float | None]:
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(_GPM_METRICS)
    request.sample1, request.sample2 = first, second
    for slot, (_, metric, _) in enumerate(_GPM_METRICS):
        request.metrics[slot].metricId = getattr(nvml, metric)
    return {
        field: (
            one.value * factor
            if one.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(one.value)
            else None
        )
        for (field, _, factor), one in zip(
            _GPM_METRICS, nvml.nvmlGpmMetricsGet(request).metrics, strict=False
        )
    }
