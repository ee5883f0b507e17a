"""Reader of GPU activity during training: one thread per node.

The first rank of a node reads the GPUs of all ranks there. Nothing here waits for a
GPU, and no error of the driver ends a run: a figure that cannot be read is None.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainer.formats.gpu_activity import (
    GPU_ACTIVITY_VARIABLE,
    GpuActivity,
    activity_of,
)
from trainer.formats.gpus import GpmWindow, GpuSample, Unavailable
from trainer.formats.nvml import GpuMonitor
from trainer.runtime.ranks import Ranks

ReadingT = TypeVar("ReadingT")

READ_EVERY_S = 0.5
"""Interval between two readings, in seconds. NVML's own windows are as long, and a
reading of eight GPUs takes a few milliseconds of one core."""
_MAX_READINGS = 2**13
"""Readings of a GPU that are kept until they are taken: those of the last hour."""
_END_WITHIN_S = 1.0
"""Longest wait for the thread at the end, in seconds. A call of the driver may never
return; the thread then ends with the process."""
_NO_GPU = "the run uses no GPU"
_MIG = "MIG is on: NVML reports whole GPUs, not the slices that the run uses"

_FIELDS_OF_SAMPLE: Mapping[str, str] = {
    "utilisation": "gpu_busy_share",
    "memory_utilisation": "memory_busy_share",
    "power_w": "gpu_power_w",
    "sm_clock_mhz": "sm_clock_mhz",
}
"""Fields of a ``StepRow``, by the figure of a sample that they need."""
_FIELDS_OF_COUNTERS = ("sm_active_share", "tensor_active_share", "dram_active_share")
"""Fields of a ``StepRow`` that need hardware counters."""
_FIGURES = frozenset(_FIELDS_OF_SAMPLE) | {"energy_j"}
"""Figures of a sample that are read: the energy gives a more exact power."""


@dataclass(slots=True, kw_only=True)
class _Readings:
    """Readings of one GPU that are not taken yet."""

    samples: deque[GpuSample] = field(
        default_factory=lambda: deque(maxlen=_MAX_READINGS)
    )
    windows: deque[GpmWindow] = field(
        default_factory=lambda: deque(maxlen=_MAX_READINGS)
    )


class GpuReader:
    """Reads the GPUs of the ranks of this node every half second, once started.

    Args:
        uuid_by_rank: UUID of the GPU of each rank whose activity this rank reports;
            None if it cannot be read. Empty on ranks that report none.
        monitor: Source of the readings; None if there is none.
        missing: Reasons why GPUs cannot be read, to be recorded.
        read_every_s: Interval between two readings, in seconds.
    """

    def __init__(
        self,
        uuid_by_rank: Mapping[int, str | None],
        monitor: GpuMonitor | None = None,
        *,
        missing: Sequence[str] = (),
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._uuid_by_rank = dict(uuid_by_rank)
        self._monitor = monitor
        self._read_every_s = read_every_s
        self._readings: dict[str, _Readings] = {}
        self._loss: str | None = None
        """Reason why a GPU is no longer read, until it is taken."""
        self._loss_known = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        reasons = list(missing)
        for uuid in self._uuid_by_rank.values():
            if uuid is not None and monitor is not None:
                self._readings[uuid] = _Readings()
                reasons += _unreadable(monitor, uuid)
        self.missing = tuple(dict.fromkeys(reasons))
        """Reasons why rows have no GPU activity, or lack some figures of it."""

    @property
    def reports(self) -> bool:
        """Whether this rank reports the activity of any rank."""
        return bool(self._uuid_by_rank)

    def start(self) -> None:
        """Start to read, unless there is nothing to read."""
        if self._readings and self._thread is None:
            self._thread = threading.Thread(
                target=self._read_until_end, name="gpu-activity", daemon=True
            )
            self._thread.start()

    def take(self) -> dict[int, GpuActivity]:
        """Return the activity since the last call, by rank.

        It has every rank whose activity this rank reports. Figures that were not read
        are None: all of them if no reading fell into the time.
        """
        activity_by_rank = {}
        for rank, uuid in self._uuid_by_rank.items():
            activity = GpuActivity()
            if uuid is not None and uuid in self._readings:
                readings = self._readings[uuid]
                activity = activity_of(
                    _take_all(readings.samples), _take_all(readings.windows)
                )
            activity_by_rank[rank] = activity
        return activity_by_rank

    def take_loss(self) -> str | None:
        """Return the reason why a GPU is no longer read; only once, else None."""
        loss, self._loss = self._loss, None
        return loss

    def close(self) -> None:
        """End the thread, and release the driver if the thread has ended."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_END_WITHIN_S)
            if self._thread.is_alive():
                return
        if self._monitor is not None:
            self._monitor.close()

    def _read_until_end(self) -> None:
        assert self._monitor is not None
        try:
            for uuid in self._readings:
                # Ends the window that began before training.
                self._monitor.gpm(uuid)
            while not self._end.wait(self._read_every_s):
                self._read()
        except Exception as error:  # noqa: BLE001 - the border: no error of NVML may end a run
            self._lose(f"{type(error).__name__}: {error}")

    def _read(self) -> None:
        """Read each GPU once."""
        assert self._monitor is not None
        for uuid, readings in self._readings.items():
            sample = self._monitor.sample(uuid, _FIGURES)
            if isinstance(sample, Unavailable):
                self._lose(sample.reason)
            else:
                readings.samples.append(sample)
            window = self._monitor.gpm(uuid)
            if isinstance(window, GpmWindow):
                readings.windows.append(window)

    def _lose(self, reason: str) -> None:
        """Note why a GPU is not read, unless such a reason is known already."""
        if not self._loss_known:
            self._loss_known = True
            self._loss = reason


def open_gpu_reader(
    ranks: Ranks,
    gpu_uuids: Sequence[str | None],
    monitor: GpuMonitor | None,
    environment: Mapping[str, str],
) -> GpuReader:
    """Return the reader of this node's GPUs; on other ranks than its first, of none.

    Args:
        ranks: This rank, and the number of its node's.
        gpu_uuids: UUID of the GPU of each rank; None without a GPU.
        monitor: Source of the readings; None on a CPU.
        environment: Environment variables, of which one turns the reader off.
    """
    if ranks.local_rank != 0:
        return GpuReader({})
    node = range(ranks.rank, ranks.rank + ranks.local_world_size)
    unread = dict.fromkeys(node)
    if monitor is None:
        return GpuReader(unread, missing=[_NO_GPU])
    if environment.get(GPU_ACTIVITY_VARIABLE) == "0":
        off = f"{GPU_ACTIVITY_VARIABLE}=0 turns it off"
        return GpuReader(unread, monitor, missing=[off])
    uuid_by_rank: dict[int, str | None] = {}
    missing: list[str] = []
    for rank in node:
        reason = _why_unread(monitor, gpu_uuids[rank])
        uuid_by_rank[rank] = gpu_uuids[rank] if reason is None else None
        missing += [] if reason is None else [reason]
    return GpuReader(uuid_by_rank, monitor, missing=missing)


def _why_unread(monitor: GpuMonitor, uuid: str | None) -> str | None:
    """Return the reason why NVML cannot read a rank's GPU; None if it can."""
    absent = monitor.why_absent()
    if absent is not None:
        return absent
    devices = monitor.devices()
    for facts in devices:
        if facts.uuid == uuid:
            return _MIG if facts.mig_enabled else None
    if any(facts.mig_enabled for facts in devices):
        return _MIG  # CUDA names the slice, which NVML does not list
    others = "; ".join(monitor.unreadable())
    return others or f"NVML lists no GPU {uuid}"


def _unreadable(monitor: GpuMonitor, uuid: str) -> list[str]:
    """Read a GPU for the first time; return the fields of rows that it lacks, and why.

    This also starts the first window of its hardware counters.
    """
    fields_by_reason: dict[str, list[str]] = {}
    sample = monitor.sample(uuid, _FIGURES)
    for figure, name in _FIELDS_OF_SAMPLE.items():
        if isinstance(sample, Unavailable):
            fields_by_reason.setdefault(sample.reason, []).append(name)
        elif figure in sample.missing and not _has_energy(figure, sample):
            fields_by_reason.setdefault(sample.missing[figure], []).append(name)
    window = monitor.gpm(uuid)
    if isinstance(window, Unavailable) and not window.for_now:
        fields_by_reason.setdefault(window.reason, []).extend(_FIELDS_OF_COUNTERS)
    return [f"{', '.join(names)}: {why}" for why, names in fields_by_reason.items()]


def _has_energy(figure: str, sample: GpuSample) -> bool:
    """Return whether a figure is the power, and the energy gives it."""
    return figure == "power_w" and sample.energy_j is not None


def _take_all(readings: deque[ReadingT]) -> list[ReadingT]:
    """Remove and return all readings, while the thread may append others."""
    return [readings.popleft() for _ in range(len(readings))]
