"""The measured device, with its host and software.

``open_device`` chooses and describes it; ``memory_budget`` and ``local_ranks`` return
the limits of its trials.
"""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.base.units import exact_bytes, floor_gib, format_bytes
from autotune.cluster.slurm import read_slurm
from autotune.cluster.slurm_facts import SlurmFacts
from autotune.errors import BadInput, MachineLacks
from autotune.machine.decide import FIX_NVML
from autotune.machine.gpu_models import RESERVE_BYTES, GpuModel, gpu_model_of
from autotune.machine.host import Host
from autotune.machine.node_facts import NodeFacts
from autotune.machine.torch_gpus import gpus_of_torch
from autotune.machine.values import HostFacts
from trainer.formats.code_hash import code_sha256
from trainer.formats.errors import TrainerError
from trainer.formats.gpus import GpuFacts, Unavailable, visible_devices
from trainer.formats.manifest import read_manifest
from trainer.formats.nvml import GpuMonitor

DeviceChoice = Literal["auto", "cpu", "cuda"]

_HIDING = (None, "", "-1", "NoDevFiles", "void", "none")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU on purpose, as users and SLURM
write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """The measured device, its host and its software."""

    device: Literal["cpu", "cuda"]
    gpus: tuple[GpuFacts, ...]
    host: HostFacts
    slurm: SlurmFacts
    versions: dict[str, str]
    """Versions of the installed libraries."""
    gpu_absent: str | None
    """Reason why there is no GPU; None if there is one."""
    used_bytes_by_gpu: tuple[int | None, ...] = ()
    """Memory in use on each GPU before this program uses it, in the order of ``gpus``;
    None if unknown."""

    @property
    def gpu(self) -> GpuFacts | None:
        """The measured GPU; None on a CPU."""
        return self.gpus[0] if self.device == "cuda" else None

    @property
    def cuda_bytes(self) -> float:
        """GPU memory that a CUDA process sees, as far as it is known.

        On a CPU, it is infinite.
        """
        if self.gpu is None:
            return math.inf
        gpu_model = gpu_model_of(self.gpu.name, self.gpu.total_bytes)
        return self.gpu.total_bytes if gpu_model is None else gpu_model.usable_bytes

    @property
    def words(self) -> str:
        """Description of the device for users.

        For a CPU, it includes the reason why it is not a GPU.
        """
        if self.gpu is None:
            return "the CPU" if self.gpus else f"the CPU ({self.gpu_absent})"
        others = f", the first of {len(self.gpus)} GPUs" if len(self.gpus) > 1 else ""
        return f"{self.gpu.name}, {format_bytes(self.gpu.total_bytes)}{others}"

    @property
    def name(self) -> str:
        """A short name for files: ``cpu``, or the GPU's."""
        if self.gpu is None:
            return "cpu"
        words = []
        for word in self.gpu.name.lower().removeprefix("nvidia ").split():
            words.append("".join(letter for letter in word if letter.isalnum()))
        return "-".join(words)


def open_device(
    choice: DeviceChoice,
    data_dir: Path,
    host: Host,
    monitor: GpuMonitor,
    *,
    without_gpu: str | None = None,
    measures: bool = True,
) -> MeasuredDevice:
    """Describe this machine and choose a device.

    Args:
        choice: Device to choose.
        data_dir: Directory of the dataset.
        host: The host.
        monitor: Its GPUs.
        without_gpu: Next step if a GPU is requested and there is none.
        measures: False if the device is only described.

    Raises:
        MachineLacks: If CUDA is requested and there is no GPU; or if NVML does not
            describe a GPU that is to be measured, or only a MIG slice of one is.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_devices(monitor.devices(), os.environ)
    absent = monitor.why_absent()
    if not absent:
        absent = None if gpus else f"CUDA_VISIBLE_DEVICES={visible} matches no GPU"
    if measures and choice != "cpu":
        _check_described(gpus, absent, monitor)
    if choice == "cuda" and not gpus:
        next_step = (
            without_gpu
            or "Use --device cpu, or run on a machine with a GPU;"
            " check it with: autotune doctor"
        )
        raise MachineLacks(f"no GPU found: {absent}", next_step=next_step)
    device: Literal["cpu", "cuda"] = "cuda" if gpus and choice != "cpu" else "cpu"
    used_bytes_by_gpu: list[int | None] = []
    if device == "cuda":
        for gpu in gpus:
            used_bytes = monitor.used_bytes(gpu.uuid)
            if isinstance(used_bytes, Unavailable):
                used_bytes_by_gpu.append(None)
            else:
                used_bytes_by_gpu.append(used_bytes)
    return MeasuredDevice(
        device=device,
        gpus=gpus,
        host=host.facts([data_dir]),
        slurm=read_slurm(),
        versions=host.library_versions(),
        gpu_absent=absent,
        used_bytes_by_gpu=tuple(used_bytes_by_gpu),
    )


def _check_described(
    gpus: tuple[GpuFacts, ...], absent: str | None, monitor: GpuMonitor
) -> None:
    """Check that NVML describes the GPUs that trials will use, as whole GPUs.

    Raises:
        MachineLacks: If it does not, or if MIG is on.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if any(gpu.mig_enabled for gpu in gpus) or "MIG-" in (visible or ""):
        raise MachineLacks(
            "MIG is on: trials get a slice of the GPU, but NVML reports the whole GPU",
            next_step=(
                "Use a GPU without MIG (CUDA_VISIBLE_DEVICES), turn MIG off (nvidia-smi"
                " -i INDEX -mig 0), or use --device cpu"
            ),
        )
    if gpus:
        unreadable = monitor.unreadable()
        # PyTorch also counts unreadable GPUs, so that its indices may differ.
        if unreadable and visible is None:
            raise MachineLacks(
                f"some GPUs are unreadable: {'; '.join(unreadable)}",
                next_step=(
                    f"{FIX_NVML}; or use the others with"
                    f" CUDA_VISIBLE_DEVICES={gpus[0].index}, or --device cpu."
                ),
            )
        return
    described = monitor.devices()
    if visible not in _HIDING and described:
        raise MachineLacks(
            f"CUDA_VISIBLE_DEVICES={visible} matches no GPU",
            next_step=(
                f"Set it to a GPU, such as {described[0].uuid}; or use --device cpu."
            ),
        )
    names_in_torch = gpus_of_torch()
    if names_in_torch:
        raise MachineLacks(
            f"PyTorch sees {', '.join(names_in_torch)}, but NVML does not: {absent}",
            next_step=f"{FIX_NVML}; or use --device cpu.",
        )


def memory_budget(
    site: MeasuredDevice,
    requested_bytes: int | None,
    as_gpu: GpuModel | None = None,
    *,
    ranks: int = 1,
) -> int:
    """Return a rank's memory budget in bytes.

    By default, it is a GPU's free memory less a reserve, or half of the host's.

    Args:
        site: The measured device.
        requested_bytes: Budget to return if the device has as much memory.
        as_gpu: Smaller GPU whose memory is simulated.
        ranks: Local ranks, which on a CPU share the host's memory.

    Raises:
        BadInput: If the request exceeds the memory, or a GPU is to be simulated without
            a GPU.
        MachineLacks: If the GPU has less memory free than the reserve.
    """
    if as_gpu is not None:
        if site.gpu is None:
            raise BadInput(
                f"--gpu {as_gpu.key} requires a GPU to measure on, and no GPU was"
                " found",
                next_step=(
                    f"Predict it instead: autotune estimate --gpu {as_gpu.key} --model"
                    " MODEL"
                ),
            )
        requested_bytes = as_gpu.budget_bytes(requested_bytes)
    if site.gpu is not None:
        owner = site.gpu.name
        total_bytes = site.gpu.total_bytes
    else:
        owner = f"this host, shared by {ranks} processes" if ranks > 1 else "this host"
        total_bytes = site.host.ram_available_bytes // ranks
    if requested_bytes is not None:
        if requested_bytes > total_bytes:
            raise BadInput(
                f"--memory {exact_bytes(requested_bytes)} exceeds the memory of"
                f" {owner}: {format_bytes(total_bytes)}",
                next_step=f"Use at most --memory {floor_gib(total_bytes)}",
            )
        return requested_bytes
    if site.gpu is None:
        return total_bytes // 2
    return _free_gpu_bytes(site, site.gpu) - RESERVE_BYTES


def _free_gpu_bytes(site: MeasuredDevice, gpu: GpuFacts) -> int:
    """Return the free memory of the measured GPU.

    Raises:
        MachineLacks: If it does not exceed the reserve.
    """
    used_bytes = site.used_bytes_by_gpu[0] if site.used_bytes_by_gpu else None
    # NVML's used memory includes the driver's reserve; if it is unreadable, the table
    # of GPU models includes that reserve.
    if used_bytes is None:
        free_bytes = int(min(gpu.total_bytes, site.cuda_bytes))
    else:
        free_bytes = gpu.total_bytes - used_bytes
    if free_bytes <= RESERVE_BYTES:
        raise MachineLacks(
            f"{gpu.name} has only {format_bytes(free_bytes)} free, less than the"
            f" reserve of {format_bytes(RESERVE_BYTES)}",
            next_step="Wait until the GPU is free, or set the budget: --memory SIZE",
        )
    return free_bytes


def local_ranks(site: MeasuredDevice, requested: int | None) -> int:
    """Return the ranks on this node: one per visible GPU, or as requested.

    Raises:
        BadInput: If there are fewer GPUs than requested.
    """
    if site.device == "cpu":
        return requested or 1
    gpu_count = len(site.gpus)
    if requested is not None and requested > gpu_count:
        raise BadInput(
            f"--ranks {requested}, but only {gpu_count} GPUs are visible",
            next_step=f"Use --ranks {gpu_count}",
        )
    return requested or gpu_count


def look_at_node(
    name: str, data_dir: Path, host: Host, monitor: GpuMonitor
) -> NodeFacts:
    """Return the facts of this node, and the code and data that it sees."""
    gpus = visible_devices(monitor.devices(), os.environ)
    dataset_hash = None
    dataset_missing = None
    try:
        dataset_hash = read_manifest(data_dir).dataset_hash
    except TrainerError as error:
        dataset_missing = error.message
    return NodeFacts(
        name=name,
        allotted_cpus=host.facts([]).allotted_cpus,
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_total_bytes=tuple(gpu.total_bytes for gpu in gpus),
        nvlinked=_are_nvlinked(gpus, monitor),
        code_sha256=code_sha256(),
        dataset_hash=dataset_hash,
        dataset_dir=str(data_dir),
        dataset_missing=dataset_missing,
    )


def _are_nvlinked(gpus: Sequence[GpuFacts], monitor: GpuMonitor) -> bool | None:
    """Return whether NVLink connects every pair of GPUs.

    Returns:
        None with fewer than two GPUs, or if it is unknown.
    """
    links = [
        monitor.nvlinked(first.uuid, second.uuid)
        for first, second in itertools.combinations(gpus, 2)
    ]
    if False in links:
        return False
    # A link that NVML cannot read is ``Unavailable``.
    is_known = all(link is True for link in links)
    return True if links and is_known else None
