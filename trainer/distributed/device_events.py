"""Points in time on a device, and copies between host and device.

Nothing here makes the host wait for the device, unless it says so.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Point in time, on the host clock or in the device's work queue (a CUDA event)."""

    moment: Any

    def reached(self) -> bool:
        """Return whether the device has reached this event."""
        return isinstance(self.moment, float) or bool(self.moment.query())

    def wait(self) -> None:
        """Wait until the device has reached this event."""
        if not isinstance(self.moment, float) and not self.moment.query():
            self.moment.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the seconds since an earlier event.

        The device must have reached both.
        """
        if isinstance(self.moment, float):
            return float(self.moment - earlier.moment)
        return float(earlier.moment.elapsed_time(self.moment)) / 1e3


def mark(device: torch.device) -> DeviceEvent:
    """Record an event in the device's queue and return it.

    On a CPU, return the current time.
    """
    if device.type != "cuda":
        return DeviceEvent(time.perf_counter())
    # The host sleeps while it waits, as spinning would take a core from DataLoader
    # workers.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return DeviceEvent(event)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start an asynchronous copy to the host.

    It is complete once the device reaches an event marked afterwards.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Start an asynchronous copy of numbers to a device, in fp64."""
    on_host = torch.tensor(
        values, dtype=torch.float64, pin_memory=device.type == "cuda"
    )
    return on_host.to(device, non_blocking=True)
