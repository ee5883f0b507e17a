"""NVIDIA GPUs as a port: what they are, what they do, and who uses them, through NVML.

Every error of NVML is translated here: a figure that cannot be had is ``None``, or ``Unavailable`` with NVML's reason.
One monitor per process: it holds one lock per GPU, because concurrent GPM calls have crashed drivers. A driver's call
may never return: each runs in a separate thread, and once one is late, NVML is not asked again.
"""

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autotune.core.hardware import GpmWindow, GpuFacts, GpuProcess, GpuSample, Unavailable, throttle_names
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.gpm import NOT_STARTED, NvmlGpmProbe

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_CLOSED = "the GPU monitor is closed"
_HINTS = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver is installed here, or the container was started without it",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA kernel module is not loaded, or no GPU was allotted",
    "NVML_ERROR_NO_PERMISSION": "this user may not read it",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated and the machine not restarted",
}

LEAST_CONTEXT_BYTES = 64 * 2**20
"""A CUDA context takes hundreds of MiB."""

ANSWER_WITHIN_S = 30.0
"""Without persistence mode the driver first initialises every GPU, which takes seconds for each."""

T = TypeVar("T")


class GpmProbe(Protocol):
    """One window of hardware counters on one GPU; each ``start`` begins it anew."""

    def start(self) -> None:
        """Begin; a failure is reported by ``stop``."""
        ...

    def stop(self) -> GpmWindow | Unavailable:
        """End, and give what was counted since ``start``."""
        ...


class GpuMonitor(Protocol):
    """Where facts about GPUs come from; GPUs are named by UUID throughout."""

    def devices(self) -> tuple[GpuFacts, ...]:
        """All GPUs that could be described, in NVML's order."""
        ...

    def unreadable(self) -> tuple[str, ...]:
        """One line for each GPU that exists and could not be described."""
        ...

    def why_absent(self) -> str | None:
        """Why ``devices`` is empty; ``None`` when it is not."""
        ...

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """Device memory that is taken, by anyone and by the driver."""
        ...

    def sample(self, uuid: str) -> GpuSample | Unavailable:
        """The GPU now; ``Unavailable`` only when nothing at all could be read."""
        ...

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """Processes with a compute context; those of other containers may be hidden."""
        ...

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """Whether two GPUs reach each other over NVLink."""
        ...

    def gpm_window(self, uuid: str) -> GpmProbe:
        """Hardware counters over a window (Hopper and later)."""
        ...

    def close(self) -> None:
        """Let go of the driver; afterwards every figure is unavailable."""
        ...


class NvmlMonitor:
    """The GPUs of this machine. Never raises for a machine without any: ``why_absent`` tells.

    Args:
        pynvml: The bindings; imported from ``nvidia-ml-py`` by default.
        clock: Where the samples' times come from.
        answer_within_s: How long to wait for one answer.
    """

    def __init__(
        self,
        *,
        pynvml: Any = None,  # noqa: ANN401 - bindings are untyped
        clock: Clock | None = None,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._clock = clock or SystemClock()
        self._answer_within_s = answer_within_s
        self._mute: str | None = None
        self._handles: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._devices: tuple[GpuFacts, ...] = ()
        self._unreadable: tuple[str, ...] = ()
        self._absent: str | None = None
        self._open = False
        try:
            self._nvml = importlib.import_module("pynvml") if pynvml is None else pynvml
        except ImportError:
            self._absent = "the Python package nvidia-ml-py is not installed"
        else:
            self._connect()

    def devices(self) -> tuple[GpuFacts, ...]:
        """As read when the monitor was made."""
        return self._devices

    def unreadable(self) -> tuple[str, ...]:
        """GPUs whose driver refused to describe them, with its reason."""
        return self._unreadable

    def why_absent(self) -> str | None:
        """The reason of the package, the driver or the permission that is missing."""
        return self._absent

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """Total minus free, as NVML's first memory interface counts: the driver's reserve is in it."""
        return self.ask(uuid, lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used))

    def sample(self, uuid: str) -> GpuSample | Unavailable:
        """One reading of every figure, each missing on its own."""
        time_s = self._clock.monotonic_s()
        figures: dict[str, Any] = {
            # First, as it is differenced over these times.
            "energy_j": self.ask(uuid, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
            "utilisation": self.ask(uuid, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            "used_bytes": self.used_bytes(uuid),
            "power_w": self.ask(uuid, lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "sm_clock_mhz": self.ask(uuid, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "throttle_reasons": self.ask(uuid, _throttle_reasons),
            "temperature_c": self.ask(
                uuid, lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            "process_count": self.ask(uuid, _processes_with_memory),
        }
        missing = [figure for figure in figures.values() if isinstance(figure, Unavailable)]
        if len(missing) == len(figures):
            return missing[0]
        reasons = {name: figure.reason for name, figure in figures.items() if isinstance(figure, Unavailable)}
        return GpuSample(time_s=time_s, missing=reasons, **{name: _or_none(figure) for name, figure in figures.items()})

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """As the driver lists them, with the host's process ids."""
        listed = self.ask(uuid, lambda nvml, gpu: list(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)))
        if isinstance(listed, Unavailable):
            return listed
        return tuple(GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory) for process in listed)

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """As the driver tells of the pair: through a bridge or a switch, and whether it is up."""
        if other not in self._handles:
            return Unavailable(reason=self._absent or f"no readable GPU has the UUID {other}")
        return self.ask(
            uuid,
            lambda nvml, gpu: (
                nvml.nvmlDeviceGetP2PStatus(gpu, self._handles[other], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                == nvml.NVML_P2P_STATUS_OK
            ),
        )

    def gpm_window(self, uuid: str) -> GpmProbe:
        """A window of GPU performance monitoring; unavailable before Hopper and on MIG."""
        return NvmlGpmProbe(functools.partial(self.ask, uuid), self._clock)

    def close(self) -> None:
        """Shut NVML down once; later calls do nothing."""
        if self._open:
            self._open = False
            self._bounded(self._nvml.nvmlShutdown)

    def ask(self, uuid: str, question: Callable[[Any, Any], T]) -> T | Unavailable:
        """Put one question (of the bindings and a device handle) under the GPU's lock, and translate its error."""
        if uuid not in self._handles:
            return Unavailable(reason=self._absent or f"no readable GPU has the UUID {uuid}")
        with self._locks[uuid]:
            if not self._open:
                return Unavailable(reason=_CLOSED)
            return self._bounded(lambda: question(self._nvml, self._handles[uuid]))

    def _bounded(self, call: Callable[[], T]) -> T | Unavailable:
        if self._mute is not None:
            return Unavailable(reason=self._mute)
        answer: Future[T | Unavailable] = Future()

        def run() -> None:
            try:
                answer.set_result(self._try(call))
            except Exception as error:  # noqa: BLE001 - raised again by whoever waits for the answer
                answer.set_exception(error)

        threading.Thread(target=run, name="nvml", daemon=True).start()
        try:
            return answer.result(timeout=self._answer_within_s)
        except TimeoutError:
            self._mute = f"NVML does not answer: a call has not returned for {self._answer_within_s:g} s"
            return Unavailable(reason=self._mute)

    def _try(self, call: Callable[[], T]) -> T | Unavailable:
        try:
            return call()
        except self._nvml.NVMLError as error:
            codes = {getattr(self._nvml, name, None): hint for name, hint in _HINTS.items()}
            hint = codes.get(getattr(error, "value", None))
            message = str(error) if str(error).startswith("NVML") else f"NVML: {error}"
            return Unavailable(reason=f"{message} ({hint})" if hint else message)

    def _connect(self) -> None:
        started = self._bounded(self._nvml.nvmlInit)
        if isinstance(started, Unavailable):
            self._absent = started.reason
            return
        self._open = True
        count = self._bounded(lambda: int(self._nvml.nvmlDeviceGetCount()))
        if isinstance(count, Unavailable):
            self._absent = count.reason
            return
        described = [self._bounded(functools.partial(self._describe, index)) for index in range(count)]
        self._devices = tuple(facts for facts in described if isinstance(facts, GpuFacts))
        self._unreadable = tuple(
            f"GPU {index}: {facts.reason}" for index, facts in enumerate(described) if isinstance(facts, Unavailable)
        )
        if not self._devices:
            self._absent = "; ".join(self._unreadable) or "the NVIDIA driver runs and reports no GPU"

    def _describe(self, index: int) -> GpuFacts:
        """Describe one GPU; what identifies it must be readable, the rest may be missing."""
        nvml = self._nvml
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        mig = self._try(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        cap = self._try(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
        mode = self._try(lambda: int(nvml.nvmlDeviceGetComputeMode(gpu)))
        capability = self._try(lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu))
        facts = GpuFacts(
            uuid=_text(nvml.nvmlDeviceGetUUID(gpu)),
            index=index,
            name=_text(nvml.nvmlDeviceGetName(gpu)),
            total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
            mig_enabled=_or_none(mig),
            power_cap_w=_or_none(cap),
            compute_mode=None if isinstance(mode, Unavailable) else _COMPUTE_MODES.get(mode, f"unknown_{mode}"),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            compute_capability=None if isinstance(capability, Unavailable) else (capability[0], capability[1]),
            mig_uuids=self._mig_uuids(gpu) if mig is True else (),
        )
        self._handles[facts.uuid] = gpu
        self._locks[facts.uuid] = threading.Lock()
        return facts

    def _mig_uuids(self, gpu: Any) -> tuple[str, ...]:  # noqa: ANN401 - an opaque handle
        nvml = self._nvml
        slots = self._try(lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)))
        found = [
            self._try(functools.partial(_mig_uuid, nvml, gpu, slot))
            for slot in range(0 if isinstance(slots, Unavailable) else slots)
        ]
        return tuple(uuid for uuid in found if isinstance(uuid, str))  # an empty slot answers "not found"


def _mig_uuid(nvml: Any, gpu: Any, slot: int) -> str:  # noqa: ANN401 - untyped bindings, an opaque handle
    return _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)))


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _or_none(figure: T | Unavailable) -> T | None:
    return None if isinstance(figure, Unavailable) else figure


def _processes_with_memory(nvml: Any, gpu: Any) -> int:  # noqa: ANN401 - untyped bindings, an opaque handle
    """Not those that merely hold the device open, as forked loader workers of a process with a context do."""
    listed = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return sum((process.usedGpuMemory or 0) >= LEAST_CONTEXT_BYTES for process in listed)


def _throttle_reasons(nvml: Any, gpu: Any) -> tuple[str, ...]:  # noqa: ANN401 - untyped bindings, an opaque handle
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except nvml.NVMLError:  # drivers before 535 know only the old name; if that fails too, its error is the answer
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return throttle_names(int(mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """A scripted GPU: each reading takes the next value of its list, the last value stays."""

    facts: GpuFacts
    used_bytes: Sequence[int | Unavailable] = (Unavailable(reason="not scripted"),)
    samples: Sequence[GpuSample | Unavailable] = (Unavailable(reason="not scripted"),)
    processes: Sequence[tuple[GpuProcess, ...] | Unavailable] = ((),)
    gpm: Sequence[GpmWindow | Unavailable] = (Unavailable(reason="not scripted"),)
    nvlinked: Sequence[str] | None = None
    """UUIDs of the GPUs that it reaches over NVLink; None where nobody can tell."""


class FakeGpuMonitor:
    """GPUs that do what a script says; times are stamped by the clock.

    Args:
        script: The GPUs.
        absent: Why there is none; needed only where the script is empty.
        clock: Where the samples' times come from.
    """

    def __init__(
        self, script: Sequence[FakeGpu] = (), *, absent: str = "the script has no GPU", clock: Clock | None = None
    ) -> None:
        self._script = {gpu.facts.uuid: gpu for gpu in script}
        self._absent = absent
        self._clock = clock or SystemClock()
        self._position: dict[tuple[str, str], int] = {}
        self._closed = False

    def devices(self) -> tuple[GpuFacts, ...]:
        """The scripted GPUs."""
        return tuple(gpu.facts for gpu in self._script.values())

    def unreadable(self) -> tuple[str, ...]:
        """None: a script is always readable."""
        return ()

    def why_absent(self) -> str | None:
        """The scripted reason, if there is no GPU."""
        return None if self._script else self._absent

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """The next scripted figure."""
        return self._next(uuid, "used_bytes", lambda gpu: gpu.used_bytes)

    def sample(self, uuid: str) -> GpuSample | Unavailable:
        """The next scripted sample, at the time of now."""
        sample = self._next(uuid, "sample", lambda gpu: gpu.samples)
        return sample if isinstance(sample, Unavailable) else replace(sample, time_s=self._clock.monotonic_s())

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """The next scripted list."""
        return self._next(uuid, "processes", lambda gpu: gpu.processes)

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """Whether the script says so."""
        for one in (uuid, other):
            if one not in self._script:
                return Unavailable(reason=f"no readable GPU has the UUID {one}")
        if self._closed:
            return Unavailable(reason=_CLOSED)
        links = self._script[uuid].nvlinked
        return Unavailable(reason="not scripted") if links is None else other in links

    def gpm_window(self, uuid: str) -> GpmProbe:
        """A window that ends in the next scripted value."""
        return _FakeGpmProbe(lambda: self._next(uuid, "gpm", lambda gpu: gpu.gpm), self._clock)

    def close(self) -> None:
        """Make every figure unavailable."""
        self._closed = True

    def _next(self, uuid: str, what: str, values: Callable[[FakeGpu], Sequence[T | Unavailable]]) -> T | Unavailable:
        if uuid not in self._script:
            return Unavailable(reason=f"no readable GPU has the UUID {uuid}")
        if self._closed:
            return Unavailable(reason=_CLOSED)
        listed = values(self._script[uuid])
        position = self._position.get((uuid, what), 0)
        self._position[uuid, what] = position + 1
        return listed[min(position, len(listed) - 1)]


class _FakeGpmProbe:
    def __init__(self, next_window: Callable[[], GpmWindow | Unavailable], clock: Clock) -> None:
        self._next_window = next_window
        self._clock = clock
        self._start_s: float | None = None

    def start(self) -> None:
        self._start_s = self._clock.monotonic_s()

    def stop(self) -> GpmWindow | Unavailable:
        start_s, self._start_s = self._start_s, None
        if start_s is None:
            return Unavailable(reason=NOT_STARTED)
        window = self._next_window()
        if isinstance(window, Unavailable):
            return window
        return replace(window, start_s=start_s, end_s=self._clock.monotonic_s())
