"""What ``autotune doctor --json`` answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.core.hardware import GpuStatus, HostFacts, MachineFacts
from autotune.decide.suitability import Finding
from autotune.show.answers import fields_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorHost(HostFacts):
    """The host, and what follows from its limits."""

    allotted_cpus: int = field()
    """CPUs that this process can keep busy: the smallest of what exists, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSlurm:
    """This process's place in a SLURM cluster, and what follows from it."""

    job_id: str | None
    end_time_s: float | None
    """Unix time."""
    nodes: int | None
    tasks: int | None
    gpus_per_node: int | None
    commands: tuple[str, ...]
    """Of SLURM, those found on PATH."""
    node_name: str | None
    """What the node's own daemon told a process that it started."""
    in_job: bool
    """Whether this process runs inside a job."""
    is_login_node: bool
    """Whether jobs can be submitted from here while this runs on no node of one."""
    seconds_left: float | None
    """Until the job's end, 0 once it has passed; null when no end is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorMachine:
    """Everything that was looked at."""

    time_utc: str
    """ISO 8601."""
    host: DoctorHost
    gpus: tuple[GpuStatus, ...]
    gpu_absent: str | None
    """Why there is no GPU."""
    gpu_unreadable: tuple[str, ...]
    """GPUs that exist and could not be described."""
    slurm: DoctorSlurm
    versions: Mapping[str, str]
    """Of the installed libraries, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorAnswer:
    """This machine, and what would spoil a measurement on it."""

    machine: DoctorMachine
    findings: tuple[Finding, ...]
    """The worst first."""
    next: str
    """The command to go on with."""


def doctor_answer(machine: MachineFacts, findings: Sequence[Finding], next_command: str) -> DoctorAnswer:
    """The machine with everything that follows from its facts."""
    host, slurm = machine.host, machine.slurm
    return DoctorAnswer(
        machine=DoctorMachine(
            time_utc=machine.time_utc.isoformat(),
            host=DoctorHost(**fields_of(host), allotted_cpus=host.allotted_cpus),
            gpus=machine.gpus,
            gpu_absent=machine.gpu_absent,
            gpu_unreadable=machine.gpu_unreadable,
            slurm=DoctorSlurm(
                **fields_of(slurm),
                in_job=slurm.in_job,
                is_login_node=slurm.is_login_node,
                seconds_left=slurm.seconds_left(machine.time_utc),
            ),
            versions=machine.versions,
        ),
        findings=tuple(findings),
        next=next_command,
    )
