"""GPU models by name, with their memory, for plans without the GPU.

NVML counts all memory that the driver manages; a CUDA process sees less, and by up to a
few hundred MiB less with some drivers, so the table has the smallest of the figures
found. "Secondary source" means not published by NVIDIA. Compute capabilities are from
NVIDIA's table, https://developer.nvidia.com/cuda-gpus, read 2026-11-21.
"""

import difflib
import re
from dataclasses import dataclass

from autotune.base.units import exact_bytes, floor_gib, format_bytes
from autotune.errors import BadInput

_MIB = 2**20
_GIB = 2**30

RESERVE_BYTES = 512 * _MIB
"""GPU memory that no default budget includes: lazily loaded kernels and library handles
take non-PyTorch memory, which no limit bounds, in steps that no trial has run."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU model; each figure is followed by its source and that source's date."""

    key: str
    names: tuple[str, ...]
    """NVML's names of all boards with the same memory."""
    compute_capability: tuple[int, int]
    total_bytes: int
    """NVML's total memory, with ECC as delivered."""
    total_source: str
    usable_bytes: int
    """Memory that a CUDA process sees: torch's ``total_memory``."""
    usable_source: str

    @property
    def name(self) -> str:
        """NVML's first name."""
        return self.names[0]

    def budget_bytes(self, requested_bytes: int | None = None) -> int:
        """Return a rank's memory budget: as requested, up to the usable memory.

        By default, it is the usable memory less the reserve.

        Raises:
            BadInput: If the request exceeds the GPU's memory.
        """
        if requested_bytes is None:
            return self.usable_bytes - RESERVE_BYTES
        if requested_bytes > self.total_bytes:
            raise BadInput(
                f"--memory {exact_bytes(requested_bytes)}"
                f" ({format_bytes(requested_bytes)}) exceeds the memory of"
                f" {self.name}: {format_bytes(self.total_bytes)}",
                next_step=(
                    f"Use at most --memory {floor_gib(self.total_bytes)}, or omit it."
                ),
            )
        return min(self.usable_bytes, requested_bytes)


_MODAL = (
    "nvidia-smi on Modal's machines,"
    " https://thundergolfer.com/blog/nvidia-gpu-memory-capacity; secondary source;"
    " 2025-01-23"
)
_SMI = "nvidia-smi outputs in many public repositories; secondary source; 2026-11-21"
_TORCH = (
    "torch's device properties printed in a public repository; secondary source;"
    " 2026-11-21"
)
_MESSAGE = "torch's out-of-memory message, two decimals of GiB, in https://github.com"
_TORCH_OF_96GB = (
    "torch's out-of-memory messages of Hopper GPUs with 96 GB in public repositories,"
    " the smallest; secondary source; 2026-11-22"
)

GPU_MODELS = (
    GpuModel(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        (8, 0),
        40 * _GIB,
        _MODAL,
        42_298_834_944,
        "deviceQuery in https://github.com/bottlerocket-os/bottlerocket/pull/3873;"
        " secondary source; 2026-11-21",
    ),
    GpuModel(
        "a100-80gb",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        (8, 0),
        80 * _GIB,
        _MODAL,
        81_049 * _MIB,
        "PCIe board in https://github.com/ekondis/mixbench/issues/47; secondary source;"
        " 2023-11-30",
    ),
    GpuModel(
        "l40s-48gb",
        ("NVIDIA L40S",),
        (8, 9),
        46_068 * _MIB,
        _MODAL,
        int(44.42 * _GIB),
        f"{_MESSAGE}/stepfun-ai/Step-Video-T2V/issues/8; secondary source; 2025-02-17",
    ),
    GpuModel(
        "rtx-4090-24gb",
        ("NVIDIA GeForce RTX 4090",),
        (8, 9),
        24_564 * _MIB,
        "nvidia-smi in https://github.com/RLinf/RLinf/issues/255; secondary source;"
        " 2025-11-12",
        int(23.64 * _GIB),
        f"{_MESSAGE}/ali-vilab/VGen/issues/104; secondary source; 2024-04-02",
    ),
    GpuModel(
        "h100-sxm-80gb",
        ("NVIDIA H100 80GB HBM3",),
        (9, 0),
        81_559 * _MIB,
        "nvidia-smi in https://github.com/NVIDIA/nccl/issues/1264; secondary source;"
        " 2026-11-21",
        81_082 * _MIB,
        _TORCH,
    ),
    GpuModel(
        "h100-pcie-80gb",
        ("NVIDIA H100 PCIe",),
        (9, 0),
        81_559 * _MIB,
        _SMI,
        81_008 * _MIB,
        _TORCH,
    ),
    GpuModel(
        "h100-nvl-94gb",
        ("NVIDIA H100 NVL",),
        (9, 0),
        95_830 * _MIB,
        _SMI,
        93 * _GIB,
        f"{_MESSAGE}/ali-vilab/VACE/issues/56; secondary source; 2025-05-16",
    ),
    # No total of this board was found; all other Hopper GPUs with 96 GB show the same.
    GpuModel(
        "h100-96gb",
        ("NVIDIA H100 96GB HBM3",),
        (9, 0),
        97_871 * _MIB,
        "nvidia-smi outputs of NVIDIA H20 and GH200; secondary source; 2026-11-22",
        96_768 * _MIB,
        _TORCH_OF_96GB,
    ),
    GpuModel(
        "h20-96gb", ("NVIDIA H20",), (9, 0), 97_871 * _MIB, _SMI, 97_285 * _MIB, _TORCH
    ),
    GpuModel(
        "gh200-96gb",
        ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        (9, 0),
        97_871 * _MIB,
        _SMI,
        96_768 * _MIB,
        _TORCH_OF_96GB,
    ),
    GpuModel(
        "gh200-144gb",
        ("NVIDIA GH200 144G HBM3e",),
        (9, 0),
        146_831 * _MIB,
        _SMI,
        145_920 * _MIB,
        "the driver's cuDeviceTotalMem in a public repository's test; secondary source;"
        " 2026-11-22",
    ),
    GpuModel(
        "h200-141gb",
        ("NVIDIA H200", "NVIDIA H200 NVL"),
        (9, 0),
        143_771 * _MIB,
        _MODAL,
        143_156 * _MIB,
        _TORCH,
    ),
    GpuModel(
        "b200-180gb",
        ("NVIDIA B200",),
        (10, 0),
        183_359 * _MIB,
        _SMI,
        int(178.35 * _GIB),
        "device query, two decimals of GiB, in https://github.com/pytorch/ao/pull/4002;"
        " secondary source; 2026-03-05",
    ),
)

_TOTAL_TOLERANCE = 0.08
"""Tolerance: GDDR shows a fifteenth more without ECC; older drivers leave out about 1
%."""


def find_gpu_model(name: str) -> GpuModel:
    """Return the GPU model of a key, of NVML's name, or of a unique beginning.

    A unique beginning fits one key only, such as ``h200``. Case, spaces, hyphens,
    underscores and a leading "NVIDIA" do not matter.

    Raises:
        BadInput: Unless one model fits.
    """
    wanted = _plain(name)
    matches = [model for model in GPU_MODELS if wanted in _plain_names(model)]
    if not matches:
        matches = [model for model in GPU_MODELS if wanted in _beginnings(model.key)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        message = f"{name!r} is ambiguous: {len(matches)} GPU models match"
        suggestions = [model.key for model in matches]
    else:
        message = f"unknown GPU model {name!r}"
        suggestions = _similar_keys(wanted)
    next_step = f"Known models: {', '.join(model.key for model in GPU_MODELS)}."
    if suggestions:
        next_step = f"Did you mean {' or '.join(suggestions)}? {next_step}"
    raise BadInput(message, next_step=next_step)


def _similar_keys(wanted: str) -> list[str]:
    """Return the keys, or those with beginnings, that a misspelt name resembles."""
    key_by_spelling = {}
    for model in GPU_MODELS:
        for spelling in (*_beginnings(model.key), _plain(model.key)):
            key_by_spelling[spelling] = model.key
    spellings = difflib.get_close_matches(wanted, key_by_spelling)
    # A dictionary, to name each key once and in order.
    return list(dict.fromkeys(key_by_spelling[spelling] for spelling in spellings))


def gpu_model_of(gpu_name: str, total_bytes: int) -> GpuModel | None:
    """Return a device's GPU model, by NVML's name and total.

    The total must be close as well, as a part of a GPU may have the name of the whole.

    Returns:
        The model, or None if unknown, as for a slice of a GPU (MIG, vGPU).
    """
    for model in GPU_MODELS:
        difference_bytes = abs(total_bytes - model.total_bytes)
        is_close = difference_bytes <= _TOTAL_TOLERANCE * model.total_bytes
        if is_close and _plain(gpu_name) in map(_plain, model.names):
            return model
    return None


def _plain_names(model: GpuModel) -> list[str]:
    """Return the key and NVML's names in the spelling of ``_plain``."""
    return [_plain(name) for name in (model.key, *model.names)]


def _plain(name: str) -> str:
    """Return a name without what does not matter when names are compared."""
    return re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia")


def _beginnings(key: str) -> set[str]:
    """Return the beginnings of a key that include the model's number.

    ``rtx`` alone is a family.
    """
    words = key.split("-")
    beginnings = ["".join(words[:count]) for count in range(1, len(words))]
    return {
        beginning
        for beginning in beginnings
        if any(character.isdigit() for character in beginning)
    }
