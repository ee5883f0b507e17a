"""Device of a rank, and the environment variables that CUDA and torch read for it."""

import os
from collections.abc import Mapping, MutableMapping

import torch

from trainer.errors import DeviceMissing

_MAX_COMPILE_THREADS = 8
"""Most processes in which Inductor compiles for one rank, unless you set another
number."""
_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def pick_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of a local rank, and select it.

    Raises:
        DeviceMissing: If there is no such GPU.
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
    """Set the environment variables of CUDA and torch's allocator.

    Options that you have set yourself stay. Call this before CUDA is first used.

    GPUs are numbered by PCI bus position, as in NVML. Expandable segments make memory
    grow almost linearly with the micro-batch size; ``cudaMallocAsync`` has no segments.
    Processes in which Inductor compiles kernels, by default as many as CPUs in every
    rank, share the CPUs.
    """
    environment.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", _compile_threads(environment)
    )
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    name = _allocator_variable(environment)
    settings = environment.get(name, "")
    if "expandable_segments" not in settings and "cudaMallocAsync" not in settings:
        if settings:
            settings += ","
        environment[name] = f"{settings}expandable_segments:True"


def _compile_threads(environment: Mapping[str, str]) -> str:
    """Return the number of processes in which this rank's Inductor compiles."""
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
