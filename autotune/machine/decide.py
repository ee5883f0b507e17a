"""Problems that make measurements on this machine unreliable, as it is now, and their fixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autotune.base.units import format_bytes
from autotune.machine.values import GpuStatus, HostFacts, MachineFacts, Unavailable, throttle_faults

Severity = Literal["fault", "warning", "note"]
"""``fault``: measurements taken now are worthless. ``warning``: they may be off. ``note``: one cannot be taken."""

SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")

MAX_LOAD_PER_ALLOTTED_CPU = 0.5
MIN_SHM_BYTES = 2**30
MAX_UNEXPLAINED_GPU_BYTES = 2 * 2**30
"""GPU memory that may be in use without a process; idle data-centre GPUs reserve less than 1 GiB for the driver."""

MEND_NVML = "Mend NVML: nvidia-smi has to list the GPU (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"


@dataclass(frozen=True, slots=True)
class Unsuitable:
    """A problem with this machine that measurements would suffer from."""

    severity: Severity
    claim: str
    next_step: str


def find_unsuitable(machine: MachineFacts) -> tuple[Unsuitable, ...]:
    """Return the problems that would spoil a measurement here, the worst first; empty if there are none."""
    found = [one for gpu in machine.gpus for one in _about_gpu(gpu)]
    found += [*_about_missing_gpus(machine), *_about_host(machine.host), *_about_software(machine)]
    return tuple(sorted(found, key=lambda one: SEVERITIES.index(one.severity)))


def _about_gpu(gpu: GpuStatus) -> Iterator[Unsuitable]:
    index, sample = gpu.facts.index, None if isinstance(gpu.sample, Unavailable) else gpu.sample
    used_bytes = None if sample is None else sample.used_bytes
    free_it = f"Wait until it is free, or choose another GPU; nvidia-smi -i {index} shows who uses it."
    if not isinstance(gpu.processes, Unavailable) and gpu.processes:
        users = ", ".join(f"pid {user.pid} ({format_bytes(user.used_bytes)})" for user in gpu.processes)
        yield Unsuitable("fault", f"Another process computes on GPU {index}: {users}.", free_it)
    elif used_bytes is not None and used_bytes > MAX_UNEXPLAINED_GPU_BYTES:
        # The driver may hide the processes of other containers and other users.
        claim = f"{format_bytes(used_bytes)} of GPU {index} are taken though no process on it can be seen from here."
        yield Unsuitable("warning", claim, free_it)
    faults = () if sample is None else throttle_faults(sample.throttle_reasons)
    if faults:
        cool = "Let it cool, check its fans, air flow and power supply, or take another GPU."
        yield Unsuitable("fault", f"GPU {index} is slowed down now: {', '.join(faults)}.", cool)
    if gpu.facts.mig_enabled:
        claim = f"MIG is on for GPU {index}: a trial would get a slice, and NVML's figures are those of all of it."
        yield Unsuitable("fault", claim, f"Take a GPU without MIG, or have it turned off: nvidia-smi -i {index} -mig 0")
    if gpu.facts.compute_mode == "prohibited":
        claim = f"GPU {index} is in compute mode 'prohibited': no process can use it."
        yield Unsuitable(
            "fault", claim, f"Take another GPU, or have the mode changed: nvidia-smi -i {index} -c DEFAULT"
        )


def _about_missing_gpus(machine: MachineFacts) -> Iterator[Unsuitable]:
    if not machine.gpus and not machine.gpu_unreadable:
        claim = f"There is no GPU to measure: {machine.gpu_absent or 'no reason was given'}."
        elsewhere = "Trials here run on the CPU; for a GPU's figures run the same commands on a machine that has it."
        yield Unsuitable("note", claim, elsewhere)
    for line in machine.gpu_unreadable:
        leave_out = f"{MEND_NVML}; or leave it out: CUDA_VISIBLE_DEVICES."
        yield Unsuitable("warning" if machine.gpus else "fault", f"A GPU cannot be described: {line}.", leave_out)


def _about_host(host: HostFacts) -> Iterator[Unsuitable]:
    load, cpus, shm_bytes = host.load_average_1min, host.allotted_cpus, host.shm_free_bytes
    if load is not None and load > MAX_LOAD_PER_ALLOTTED_CPU * cpus:
        claim = f"The load average is {load:.2f} with {cpus} allotted CPUs: loader workers would compete for them."
        yield Unsuitable(
            "warning", claim, "Wait until the machine is quiet, or take a whole node (sbatch --exclusive)."
        )
    if shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        claim = f"/dev/shm has {format_bytes(shm_bytes)} free: loader workers pass batches through it."
        yield Unsuitable("warning", claim, "Enlarge it (for a container: --shm-size=8g), or free what lies there.")
    for disk in host.disks:
        if disk.is_network:
            claim = f"{disk.path} lies on a network file system ({disk.filesystem_type}): reading depends on others."
            yield Unsuitable("warning", claim, "Copy the dataset to a disk of this node first, and measure from there.")


def _about_software(machine: MachineFacts) -> Iterator[Unsuitable]:
    if machine.slurm.is_login_node:
        claim = "sbatch is on PATH and this is not a SLURM job: it looks like a login node, shared and without GPUs."
        yield Unsuitable("warning", claim, "Look from inside a job: srun --gpus=1 autotune doctor")
    for name in ("torch", "transformers"):
        if name not in machine.versions:
            claim = f"{name} is not installed for this Python: no trial can run."
            yield Unsuitable("fault", claim, f"Install it: python -m pip install {name}")
