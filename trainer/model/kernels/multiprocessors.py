"""Number of SMs of a device, for kernels whose programs each compute many tiles."""

import functools

import torch

_ASSUMED_SMS = 132
"""SMs of an H100 or H200, assumed for steps that are traced without a GPU."""


def count_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU, and an H100's for any other device."""
    if device.type != "cuda":
        return _ASSUMED_SMS
    return _sms_of_gpu(device.index)


@functools.cache
def _sms_of_gpu(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
