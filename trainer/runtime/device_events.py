"""Points in time on a device, and copies between host and device.

Only ``DeviceEvent.wait`` makes the host wait for the device.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Point in time in the work queue of a device; ``mark`` makes one."""

    moment: Any
    """A ``torch.cuda.Event`` on a GPU; on a CPU the time of ``time.perf_counter``, in
    seconds."""

    def reached(self) -> bool:
        """Return whether the device has reached this event."""
        return isinstance(self.moment, float) or bool(self.moment.query())

    def wait(self) -> None:
        """Wait until the device has reached this event."""
        if not isinstance(self.moment, float) and not self.moment.query():
            self.moment.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the seconds since an earlier event of the same device.

        The device must have reached both events.
        """
        if isinstance(self.moment, float):
            return float(self.moment - earlier.moment)
        elapsed_ms = float(earlier.moment.elapsed_time(self.moment))
        return elapsed_ms / 1e3


def mark(device: torch.device) -> DeviceEvent:
    """Return a new event at the end of the device's queue; on a CPU, that is now."""
    if device.type != "cuda":
        return DeviceEvent(time.perf_counter())
    # The host sleeps while it waits, as spinning would take a core from DataLoader
    # workers.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return DeviceEvent(event)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host, whose values may not be there yet.

    The copy is complete once the device reaches an event marked afterwards.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on a device, fp64, shape (N,)."""
    on_host = torch.tensor(
        values, dtype=torch.float64, pin_memory=device.type == "cuda"
    )
    return on_host.to(device, non_blocking=True)
