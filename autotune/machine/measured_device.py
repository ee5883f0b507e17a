"""The measured machine, and its fingerprint for the profile.

It is a device with its host and software.
"""

import itertools
import math
import os
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
    gpu_absent: str | None
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
        words = self.gpu.name.lower().removeprefix("nvidia ").split()
        return "-".join("".join(c for c in word if c.isalnum()) for word in words)


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
    absent = monitor.why_absent() or (
        None if gpus else f"CUDA_VISIBLE_DEVICES={visible} matches no GPU"
    )
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
    readings = (
        [monitor.used_bytes(gpu.uuid) for gpu in gpus] if device == "cuda" else []
    )
    used = tuple(None if isinstance(one, Unavailable) else one for one in readings)
    facts, versions, slurm = (
        host.facts([data_dir]),
        host.library_versions(),
        read_slurm(),
    )
    return MeasuredDevice(
        device=device,
        gpus=gpus,
        host=facts,
        slurm=slurm,
        versions=versions,
        gpu_absent=absent,
        used_bytes_by_gpu=used,
    )


def _check_described(
    gpus: tuple[GpuFacts, ...], absent: str | None, monitor: GpuMonitor
) -> None:
    """Check that NVML describes the GPUs that trials will use.

    They must be whole GPUs.
    """
    described, unreadable, visible = (
        monitor.devices(),
        monitor.unreadable(),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if any(gpu.mig_enabled for gpu in gpus) or "MIG-" in (visible or ""):
        told = (
            "MIG is on: trials get a slice of the GPU, but NVML reports the whole GPU"
        )
        without_mig = (
            "Use a GPU without MIG (CUDA_VISIBLE_DEVICES), turn MIG off (nvidia-smi -i"
            " INDEX -mig 0)"
        )
        raise MachineLacks(told, next_step=f"{without_mig}, or use --device cpu")
    if gpus and unreadable and visible is None:  # PyTorch also counts unreadable GPUs
        next_step = (
            f"{FIX_NVML}; or use the others with CUDA_VISIBLE_DEVICES={gpus[0].index},"
            " or --device cpu."
        )
        raise MachineLacks(
            f"some GPUs are unreadable: {'; '.join(unreadable)}", next_step=next_step
        )
    if not gpus and visible not in _HIDING and described:
        next_step = (
            f"Set it to a GPU, such as {described[0].uuid}; or use --device cpu."
        )
        raise MachineLacks(
            f"CUDA_VISIBLE_DEVICES={visible} matches no GPU", next_step=next_step
        )
    if not gpus and (seen := gpus_of_torch()):
        told = f"PyTorch sees {', '.join(seen)}, but NVML does not: {absent}"
        raise MachineLacks(told, next_step=f"{FIX_NVML}; or use --device cpu.")


def memory_budget(
    site: MeasuredDevice,
    asked_bytes: int | None,
    as_gpu: GpuModel | None = None,
    *,
    ranks: int = 1,
) -> int:
    """Return a rank's memory budget in bytes.

    It is as requested. By default, it is a GPU's free memory less a reserve, or half of
    the host's. Local ranks on a CPU share the host. ``as_gpu`` is a smaller GPU whose
    memory is simulated.

    Raises:
        BadInput: If the request exceeds the memory, or a GPU is to be simulated without
            a GPU.
    """
    if as_gpu is not None:
        if site.gpu is None:
            told = (
                f"--gpu {as_gpu.key} requires a GPU to measure on, and no GPU was found"
            )
            raise BadInput(
                told,
                next_step=(
                    f"Predict it instead: autotune estimate --gpu {as_gpu.key} --model"
                    " MODEL"
                ),
            )
        asked_bytes = as_gpu.budget_bytes(asked_bytes)
    if site.gpu is not None:
        there_bytes, what = site.gpu.total_bytes, site.gpu.name
        used_bytes = site.used_bytes_by_gpu[0] if site.used_bytes_by_gpu else None
        # NVML's used memory includes the driver's reserve; if it is unreadable, the
        # table includes that reserve.
        free_bytes = (
            min(there_bytes, site.cuda_bytes)
            if used_bytes is None
            else there_bytes - used_bytes
        )
        default_bytes = int(free_bytes) - RESERVE_BYTES
        if asked_bytes is None and default_bytes <= 0:
            free, reserve = format_bytes(int(free_bytes)), format_bytes(RESERVE_BYTES)
            told = f"{what} has only {free} free, less than the reserve of {reserve}"
            raise MachineLacks(
                told,
                next_step=(
                    "Wait until the GPU is free, or set the budget: --memory SIZE"
                ),
            )
    else:
        what = f"this host, shared by {ranks} processes" if ranks > 1 else "this host"
        there_bytes = site.host.ram_available_bytes // ranks
        default_bytes = there_bytes // 2
    if asked_bytes is not None and asked_bytes > there_bytes:
        told = (
            f"--memory {exact_bytes(asked_bytes)} exceeds the memory of {what}:"
            f" {format_bytes(there_bytes)}"
        )
        raise BadInput(told, next_step=f"Use at most --memory {floor_gib(there_bytes)}")
    return asked_bytes or default_bytes


def local_ranks(site: MeasuredDevice, asked: int | None) -> int:
    """Return the ranks on this node: one per visible GPU, or as requested.

    Raises:
        BadInput: If there are fewer GPUs than requested.
    """
    if site.device == "cpu":
        return asked or 1
    if asked is not None and asked > len(site.gpus):
        there = len(site.gpus)
        raise BadInput(
            f"--ranks {asked}, but only {there} GPUs are visible",
            next_step=f"Use --ranks {there}",
        )
    return asked or len(site.gpus)


def look_at_node(
    name: str, data_dir: Path, host: Host, monitor: GpuMonitor
) -> NodeFacts:
    """Return the facts of this node, and the code and data that it sees."""
    gpus = visible_devices(monitor.devices(), os.environ)
    links = {
        monitor.nvlinked(one.uuid, other.uuid)
        for one, other in itertools.combinations(gpus, 2)
    }
    dataset, missing = None, None
    try:
        dataset = read_manifest(data_dir).dataset_hash
    except TrainerError as error:
        missing = error.message
    return NodeFacts(
        name=name,
        allotted_cpus=host.facts([]).allotted_cpus,
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_total_bytes=tuple(gpu.total_bytes for gpu in gpus),
        nvlinked=False if False in links else True if links == {True} else None,
        code_sha256=code_sha256(),
        dataset_hash=dataset,
        dataset_dir=str(data_dir),
        dataset_missing=missing,
    )
