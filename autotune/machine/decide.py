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
"""Free shared memory below which DataLoader workers may not run."""
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
    problems: list[Unsuitable] = []
    for gpu in machine.gpus:
        problems += _about_gpu(gpu)
    problems += _about_missing_gpus(machine)
    problems += _about_host(machine)
    problems += _about_software(machine)
    problems.sort(key=lambda problem: SEVERITIES.index(problem.severity))
    return tuple(problems)


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
    """Yield problems of a GPU: other processes, throttling, and its mode."""
    yield from _about_gpu_users(gpu)
    index = gpu.facts.index
    faults: tuple[str, ...] = ()
    if not isinstance(gpu.sample, Unavailable):
        faults = throttle_faults(gpu.sample.throttle_reasons)
    if faults:
        yield Unsuitable(
            "error",
            f"GPU {index} is throttled: {', '.join(faults)}.",
            "Let it cool, check its fans, air flow and power supply, or use another"
            " GPU.",
        )
    if gpu.facts.mig_enabled:
        yield Unsuitable(
            "error",
            f"MIG is on for GPU {index}: trials would get a slice, but NVML reports the"
            " whole GPU.",
            f"Use a GPU without MIG, or turn MIG off: nvidia-smi -i {index} -mig 0",
        )
    if gpu.facts.compute_mode == "prohibited":
        yield Unsuitable(
            "error",
            f"GPU {index} is in compute mode 'prohibited': no process can use it.",
            f"Use another GPU, or change the mode: nvidia-smi -i {index} -c DEFAULT",
        )


def _about_gpu_users(gpu: GpuStatus) -> Iterator[Unsuitable]:
    """Yield a problem if a GPU is in use."""
    index = gpu.facts.index
    next_step = (
        f"Wait until it is free, or choose another GPU; nvidia-smi -i {index} shows its"
        " processes."
    )
    if not isinstance(gpu.processes, Unavailable) and gpu.processes:
        processes = ", ".join(
            f"pid {process.pid} ({format_bytes(process.used_bytes)})"
            for process in gpu.processes
        )
        yield Unsuitable(
            "error", f"Another process uses GPU {index}: {processes}.", next_step
        )
        return
    if isinstance(gpu.sample, Unavailable) or gpu.sample.used_bytes is None:
        return
    used_bytes = gpu.sample.used_bytes
    # The driver may hide the processes of other containers and other users.
    if used_bytes > MAX_UNEXPLAINED_GPU_BYTES:
        yield Unsuitable(
            "warning",
            f"{format_bytes(used_bytes)} of GPU {index} are in use, but no process on"
            " it is visible.",
            next_step,
        )


def _about_missing_gpus(machine: MachineFacts) -> Iterator[Unsuitable]:
    """Yield problems of GPUs that do not exist, or cannot be read."""
    if not machine.gpus and not machine.gpu_unreadable:
        yield Unsuitable(
            "info",
            f"No GPU found: {machine.gpu_absent or 'unknown reason'}.",
            "Trials run on the CPU; to measure a GPU, run the same commands on a"
            " machine with one.",
        )
    for line in machine.gpu_unreadable:
        yield Unsuitable(
            "warning" if machine.gpus else "error",
            f"A GPU is unreadable: {line}.",
            f"{FIX_NVML}; or hide that GPU with CUDA_VISIBLE_DEVICES.",
        )


def _about_host(machine: MachineFacts) -> Iterator[Unsuitable]:
    """Yield problems of the load, shared memory, disks and a login node."""
    host = machine.host
    load = host.load_average_1min
    if load is not None and is_busy(load, host.allotted_cpus):
        yield busy_host(load, host.allotted_cpus)
    shm_bytes = host.shm_free_bytes
    if shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        yield Unsuitable(
            "warning",
            f"/dev/shm has only {format_bytes(shm_bytes)} free: DataLoader workers pass"
            " batches through it.",
            "Enlarge it (container: --shm-size=8g), or remove files there.",
        )
    for disk in host.disks:
        if disk.is_network:
            yield Unsuitable(
                "warning",
                f"{disk.path} is on a network file system ({disk.filesystem_type}): its"
                " speed depends on others.",
                "Copy the dataset to a local disk of this node, and measure there.",
            )
    if machine.slurm.is_login_node:
        yield Unsuitable(
            "warning",
            "This looks like a login node: sbatch is on PATH, and this is not a SLURM"
            " job.",
            "Run it in a job: srun --gpus=1 autotune doctor",
        )


def _about_software(machine: MachineFacts) -> Iterator[Unsuitable]:
    """Yield problems of packages that conflict or are missing."""
    for name in machine.conflicting_distributions:
        yield Unsuitable(
            "error",
            f"The distribution {name!r} installs a package of the same name as one of"
            " this tool: one of them replaces files of the other.",
            f"Remove it: python -m pip uninstall {name}; then install encoder-autotune"
            " again with --force-reinstall --no-deps",
        )
    for name in ("torch", "transformers"):
        if name not in machine.versions:
            yield Unsuitable(
                "error",
                f"{name} is not installed: no trial can run.",
                f"Install it: python -m pip install {name}",
            )
