"""Memory of this process: its peak."""

import torch

from trainer.formats.process_status import status_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: reserved by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Not getrusage's peak, which is inherited from the parent process.
    return status_bytes("VmHWM")
