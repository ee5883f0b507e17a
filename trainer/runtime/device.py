"""Device of a rank, and the environment variables that CUDA and torch read for it."""

import os
from collections.abc import Mapping, MutableMapping

import torch

from trainer.formats.errors import DeviceMissing

_COMPILE_THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable: number of processes in which Inductor compiles kernels."""
_MAX_COMPILE_THREADS = 8
"""Largest default of ``TORCHINDUCTOR_COMPILE_THREADS``, for one rank."""
_DEVICE_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
"""Environment variable: order in which CUDA numbers GPUs."""
_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""Environment variable: settings of torch's allocator."""
_OLD_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""Older name of ``PYTORCH_ALLOC_CONF``, which torch still reads."""


def pick_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of a local rank, and make it torch's current device.

    Raises:
        DeviceMissing: If this node has no GPU of that number.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    set_cuda_defaults(os.environ)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= gpus:
        raise DeviceMissing(
            f"process {local_rank} of this node requires a GPU, but torch sees {gpus}",
            next_step=(
                "Start one process per GPU (--nproc-per-node), or use --set"
                " train.device=cpu"
            ),
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_cuda_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the environment variables of Inductor, CUDA and torch's allocator.

    Values that you have set yourself stay. Call this before CUDA is first used.
    """
    # By default, every rank would start as many processes as there are CPUs.
    environment.setdefault(_COMPILE_THREADS_VARIABLE, _compile_threads(environment))
    # NVML numbers GPUs in this order too.
    environment.setdefault(_DEVICE_ORDER_VARIABLE, "PCI_BUS_ID")
    _expand_segments(environment)


def _expand_segments(environment: MutableMapping[str, str]) -> None:
    """Add expandable segments to the settings of the allocator.

    Memory then grows almost linearly with the micro-batch size. The allocator
    ``cudaMallocAsync`` has no segments.
    """
    variable = _allocator_variable(environment)
    settings = environment.get(variable, "")
    if "expandable_segments" in settings or "cudaMallocAsync" in settings:
        return
    if settings:
        settings += ","
    environment[variable] = f"{settings}expandable_segments:True"


def _compile_threads(environment: Mapping[str, str]) -> str:
    """Return the number of processes in which this rank's Inductor compiles.

    All ranks of a node share its CPUs.
    """
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    cpus_per_rank = len(os.sched_getaffinity(0)) // local_world_size
    return str(max(1, min(_MAX_COMPILE_THREADS, cpus_per_rank)))


def _allocator_variable(environment: Mapping[str, str]) -> str:
    """Return the environment variable from which torch's allocator takes settings.

    If both are set, torch reads only the older one, even if it is empty.
    """
    if _OLD_ALLOCATOR_VARIABLE in environment:
        return _OLD_ALLOCATOR_VARIABLE
    return _ALLOCATOR_VARIABLE
