"""When something happened on the device, and what it found, without waiting for it."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: on the host, or in the device's queue of work."""

    moment: float | torch.cuda.Event

    def reached(self) -> bool:
        """Whether the device has come so far."""
        return not isinstance(self.moment, torch.cuda.Event) or bool(self.moment.query())

    def wait(self) -> None:
        """Wait until the device has come so far."""
        if isinstance(self.moment, torch.cuda.Event):
            self.moment.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        """Time between two moments that were both reached."""
        if isinstance(self.moment, torch.cuda.Event) and isinstance(earlier.moment, torch.cuda.Event):
            return float(earlier.moment.elapsed_time(self.moment)) / 1e3
        assert isinstance(self.moment, float)
        assert isinstance(earlier.moment, float)
        return self.moment - earlier.moment


def mark(device: torch.device) -> Mark:
    """This moment in the device's queue; a CPU has none, so it is now."""
    if device.type != "cuda":
        return Mark(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Mark(event)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is on its way; it has arrived when the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
