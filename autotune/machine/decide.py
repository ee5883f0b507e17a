"""Problems that make measurements on this machine unreliable, and their fixes."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.base.severity import SEVERITIES, Severity
from autotune.base.units import format_bytes
from autotune.machine.values import GpuStatus, MachineFacts, throttle_faults
from trainer.formats.gpus import Unavailable

MAX_LOAD_PER_ALLOTTED_CPU = 0.5
"""Load average per available CPU core above which other programs disturb trials."""
MIN_SHM_BYTES = 2**30
MAX_UNEXPLAINED_GPU_BYTES = 2 * 2**30
"""GPU memory that may be in use without a process; the driver reserves less than 1 GiB
on idle data-centre GPUs."""

FIX_NVML = (
    "Fix NVML: nvidia-smi must list the GPU (in a container:"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)


@dataclass(frozen=True, slots=True)
class Unsuitable:
    """A problem that makes measurements unreliable."""

    severity: Severity
    """``error``: measurements would be worthless. ``warning``: they may be off.
    ``info``: some are not possible."""
    claim: str
    next_step: str


def find_unsuitable(machine: MachineFacts) -> tuple[Unsuitable, ...]:
    """Return the problems that make measurements unreliable, the worst first."""
    found = [one for gpu in machine.gpus for one in _about_gpu(gpu)]
    found += _about_machine(machine)
    return tuple(sorted(found, key=lambda one: SEVERITIES.index(one.severity)))


def is_busy(load_average_1min: float, allotted_cpus: int) -> bool:
    """Return whether a host is too busy for measurements."""
    return load_average_1min > MAX_LOAD_PER_ALLOTTED_CPU * allotted_cpus


def busy_host(load_average_1min: float, allotted_cpus: int) -> Unsuitable:
    """Return the problem of a busy host."""
    return Unsuitable(
        "warning",
        f"The load average is {load_average_1min:.2f} with {allotted_cpus} available"
        " CPU cores: trials would compete for them.",
        "Wait until it is idle, or request a whole node: sbatch --exclusive",
    )


def _about_gpu(gpu: GpuStatus) -> Iterator[Unsuitable]:
    index, sample = (
        gpu.facts.index,
        None if isinstance(gpu.sample, Unavailable) else gpu.sample,
    )
    used_bytes = None if sample is None else sample.used_bytes
    free_it = (
        f"Wait until it is free, or choose another GPU; nvidia-smi -i {index} shows its"
        " processes."
    )
    if not isinstance(gpu.processes, Unavailable) and gpu.processes:
        users = ", ".join(
            f"pid {user.pid} ({format_bytes(user.used_bytes)})"
            for user in gpu.processes
        )
        yield Unsuitable(
            "error", f"Another process uses GPU {index}: {users}.", free_it
        )
    elif used_bytes is not None and used_bytes > MAX_UNEXPLAINED_GPU_BYTES:
        # The driver may hide the processes of other containers and other users.
        claim = (
            f"{format_bytes(used_bytes)} of GPU {index} are in use, but no process on"
            " it is visible."
        )
        yield Unsuitable("warning", claim, free_it)
    faults = () if sample is None else throttle_faults(sample.throttle_reasons)
    if faults:
        cool = (
            "Let it cool, check its fans, air flow and power supply, or use another"
            " GPU."
        )
        yield Unsuitable(
            "error", f"GPU {index} is throttled: {', '.join(faults)}.", cool
        )
    if gpu.facts.mig_enabled:
        claim = (
            f"MIG is on for GPU {index}: trials would get a slice, but NVML reports the"
            " whole GPU."
        )
        yield Unsuitable(
            "error",
            claim,
            f"Use a GPU without MIG, or turn MIG off: nvidia-smi -i {index} -mig 0",
        )
    if gpu.facts.compute_mode == "prohibited":
        claim = f"GPU {index} is in compute mode 'prohibited': no process can use it."
        yield Unsuitable(
            "error",
            claim,
            f"Use another GPU, or change the mode: nvidia-smi -i {index} -c DEFAULT",
        )


def _about_machine(machine: MachineFacts) -> Iterator[Unsuitable]:
    """Yield problems of GPUs that are missing, of the host, and of the software."""
    host, cpus = machine.host, machine.host.allotted_cpus
    load, shm_bytes = host.load_average_1min, host.shm_free_bytes
    if not machine.gpus and not machine.gpu_unreadable:
        claim = f"No GPU found: {machine.gpu_absent or 'unknown reason'}."
        elsewhere = (
            "Trials run on the CPU; to measure a GPU, run the same commands on a"
            " machine with one."
        )
        yield Unsuitable("info", claim, elsewhere)
    for line in machine.gpu_unreadable:
        leave_out = f"{FIX_NVML}; or hide that GPU with CUDA_VISIBLE_DEVICES."
        yield Unsuitable(
            "warning" if machine.gpus else "error",
            f"A GPU is unreadable: {line}.",
            leave_out,
        )
    if load is not None and is_busy(load, cpus):
        yield busy_host(load, cpus)
    if shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        claim = (
            f"/dev/shm has only {format_bytes(shm_bytes)} free: DataLoader workers pass"
            " batches through it."
        )
        yield Unsuitable(
            "warning",
            claim,
            "Enlarge it (container: --shm-size=8g), or remove files there.",
        )
    for disk in host.disks:
        if disk.is_network:
            claim = (
                f"{disk.path} is on a network file system ({disk.filesystem_type}): its"
                " speed depends on others."
            )
            yield Unsuitable(
                "warning",
                claim,
                "Copy the dataset to a local disk of this node, and measure there.",
            )
    if machine.slurm.is_login_node:
        claim = (
            "This looks like a login node: sbatch is on PATH, and this is not a SLURM"
            " job."
        )
        yield Unsuitable(
            "warning", claim, "Run it in a job: srun --gpus=1 autotune doctor"
        )
    for name in machine.conflicting_distributions:
        claim = (
            f"The distribution {name!r} installs a package of the same name as one of"
            " this tool: one of them replaces files of the other."
        )
        yield Unsuitable(
            "error",
            claim,
            f"Remove it: python -m pip uninstall {name}; then install encoder-autotune"
            " again with --force-reinstall --no-deps",
        )
    for name in ("torch", "transformers"):
        if name not in machine.versions:
            claim = f"{name} is not installed: no trial can run."
            yield Unsuitable(
                "error", claim, f"Install it: python -m pip install {name}"
            )
