"""Request for a memory prediction, and the device to predict for."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from autotune.base.units import format_bytes
from autotune.errors import UsageError
from autotune.machine.gpu_models import (
    GPU_MODELS,
    RESERVE_BYTES,
    GpuModel,
    find_gpu_model,
    gpu_model_of,
)
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from trainer.formats.gpus import visible_devices
from trainer.formats.nvml import NvmlMonitor
from trainer.formats.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """Request for a memory prediction."""

    configs: tuple[TrainConfig, ...]
    """Settings of the step of each model, all on the same device; batch sizes are
    ignored."""
    gpu: str | None
    """Key of the GPU model; None if it is not given."""
    memory_bytes: int | None
    """Memory budget; None for that of the GPU, less a reserve."""
    data: Path | None
    """Dataset, for its vocabulary and the contents of its sequences; None to assume
    them."""
    vocab_size: int
    """Vocabulary size without a dataset."""
    ranks: int
    """Data-parallel ranks on all nodes together."""
    accumulate: bool
    """True if an optimizer step has several micro-batches on each rank."""
    tensor_ranks: int
    """Ranks among which the memory of tensor parallelism is predicted."""
    pipeline_stages: int
    """Stages among which the memory of pipeline parallelism is predicted."""
    max_micro_batch_size: int
    """Largest size to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device to predict for: a known GPU, or an amount of memory."""

    name: str
    """Name of the GPU, or the amount of memory, in words."""
    budget_bytes: int
    """Memory that a step may use."""
    overheads: OverheadsRange
    """Memory that the device needs in addition to a traced step, with its range."""
    reserve_bytes: int = 0
    """GPU memory that is left out of the budget."""


def find_target(request: PredictionRequest) -> Target:
    """Return the device to predict for, with its memory budget.

    Raises:
        BadInput: If the GPU is not found, or has less memory than the budget.
        UsageError: If there is neither a GPU nor an amount of memory to predict for,
            or if a CPU has no memory budget or is requested together with a GPU.
    """
    if request.configs[0].device == "cpu":
        return _cpu_target(request)
    gpu_model: GpuModel | None = None
    if request.gpu is not None:
        gpu_model = find_gpu_model(request.gpu)
    elif request.memory_bytes is None:
        gpu_model = _detected_gpu()
    if gpu_model is not None:
        return _gpu_target(gpu_model, request)
    if request.memory_bytes is None:
        keys = ", ".join(known.key for known in GPU_MODELS)
        raise UsageError(
            "no known GPU detected: --gpu or --memory is required",
            next_step=f"Add --gpu with one of {keys}; or --memory 24GiB.",
        )
    return Target(
        name=f"a GPU with {format_bytes(request.memory_bytes)}",
        budget_bytes=request.memory_bytes,
        overheads=overheads_on_gpu(None, request.ranks),
    )


def _cpu_target(request: PredictionRequest) -> Target:
    """Return a CPU with the requested memory budget.

    Raises:
        UsageError: If there is no budget, or a GPU is requested too.
    """
    budget_bytes = request.memory_bytes
    if budget_bytes is None or request.gpu is not None:
        raise UsageError(
            "--device cpu requires --memory, without --gpu",
            next_step="Try --device cpu --memory 2GiB.",
        )
    return Target(
        name=f"a CPU with {format_bytes(budget_bytes)}",
        budget_bytes=budget_bytes,
        overheads=overheads_on_cpu(),
    )


def _gpu_target(gpu_model: GpuModel, request: PredictionRequest) -> Target:
    """Return a GPU with the requested memory budget, or all its memory but a reserve.

    Raises:
        BadInput: If the GPU has less memory than the budget.
    """
    return Target(
        name=gpu_model.name,
        budget_bytes=gpu_model.budget_bytes(request.memory_bytes),
        reserve_bytes=0 if request.memory_bytes else RESERVE_BYTES,
        overheads=overheads_on_gpu(
            gpu_model.compute_capability, request.ranks, gpu_model.usable_bytes
        ),
    )


def _detected_gpu() -> GpuModel | None:
    """Return the model of this machine's first visible GPU; None if it is unknown."""
    with contextlib.closing(NvmlMonitor()) as monitor:
        gpus = visible_devices(monitor.devices(), os.environ)
    return gpu_model_of(gpus[0].name, gpus[0].total_bytes) if gpus else None
