"""Output of ``autotune doctor``.

It shows facts about a machine, and problems that make measurements unreliable.
"""

from collections.abc import Iterator, Sequence

from autotune.base.document import (
    Block,
    Bullets,
    Section,
    Table,
    facts_table,
    paragraph,
    table_of,
)
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.cluster.slurm_facts import SlurmFacts
from autotune.machine.decide import Unsuitable
from autotune.machine.host import LIBRARIES
from autotune.machine.values import DiskFacts, GpuStatus, MachineFacts, NicFacts
from trainer.formats.gpus import Unavailable


def doctor_text(machine: MachineFacts, findings: Sequence[Unsuitable]) -> str:
    """Render the facts, section by section, and then the findings.

    There is no final newline.
    """
    seconds_left = machine.slurm.seconds_left(machine.time_utc)
    slurm_rows = list(_slurm_rows(machine.slurm, seconds_left))
    blocks_by_title: dict[str, tuple[Block, ...]] = {
        "Host": (facts_table("", list(_host_rows(machine))),),
        "GPUs": _gpus(machine),
        "Disks": (_disks(machine.host.disks),),
        "Network": (_nics(machine.host.nics),),
        "SLURM": (facts_table("", slurm_rows),),
        "Problems for measurements": (_findings(findings),),
    }
    sections = [
        Section(title=title, key="", blocks=blocks)
        for title, blocks in blocks_by_title.items()
    ]
    return console_text(sections)


def _disks(disks: Sequence[DiskFacts]) -> Table:
    return table_of(
        "",
        disks,
        ("path", "l", lambda disk: disk.path),
        ("file system", "l", lambda disk: disk.filesystem_type),
        ("place", "l", _disk_place),
        ("free", "r", lambda disk: format_bytes(disk.free_bytes)),
    )


def _disk_place(disk: DiskFacts) -> str | None:
    if disk.filesystem_type is None:
        return None
    return "network" if disk.is_network else "local"


def _nics(nics: Sequence[NicFacts]) -> Block:
    """Return the table of network interfaces, or a paragraph without any."""
    connecting = [nic for nic in nics if not nic.is_loopback]
    if not connecting:
        return paragraph("loopback only")
    return table_of(
        "",
        connecting,
        ("interface", "l", lambda nic: nic.name),
        ("state", "l", lambda nic: "up" if nic.is_up else "down"),
        ("speed", "r", lambda nic: _speed(nic.speed_bits_per_s)),
    )


def _findings(findings: Sequence[Unsuitable]) -> Block:
    """Return two lines for each problem: what it is, and what to do."""
    if not findings:
        return paragraph("none found")
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.claim}")
        lines.append(f"  {finding.next_step}")
    return Bullets(items=tuple((line,) for line in lines))


def _host_rows(machine: MachineFacts) -> Iterator[Row]:
    host = machine.host
    quota = "none" if host.cpus_quota is None else f"{host.cpus_quota:g}"
    slurm = "none" if host.cpus_slurm is None else str(host.cpus_slurm)
    limits = (
        f"online {host.cpus_online}, affinity {host.cpus_affinity}, quota {quota},"
        f" SLURM {slurm}"
    )
    ram_limit = host.ram_limit_source
    if host.ram_limit_bytes is not None:
        ram_limit += f" of {format_bytes(host.ram_limit_bytes)}"
    yield "platform", host.platform
    yield "CPU", host.cpu_model
    yield "available CPU cores", f"{host.allotted_cpus} ({limits})"
    yield "load average", f"{format_count(host.load_average_1min, 2)} over 1 min"
    yield "RAM", format_bytes(host.ram_total_bytes)
    available = format_bytes(host.ram_available_bytes)
    yield "RAM available", f"{available}, as limited by {ram_limit}"
    yield "/dev/shm free", format_bytes(host.shm_free_bytes)
    yield "Python", host.python_version
    for name in LIBRARIES:
        yield name, machine.versions.get(name, "not installed")


def _gpus(machine: MachineFacts) -> tuple[Block, ...]:
    if not machine.gpus:
        return (paragraph(f"none: {machine.gpu_absent}"),)
    state = (
        "GPU",
        "name",
        "memory",
        "used",
        "busy",
        "power",
        "SM clock",
        "temp.",
        "throttled by",
    )
    identity = ("GPU", "UUID", "compute", "mode", "MIG", "driver", "processes")
    return (
        Table(
            caption="",
            headers=state,
            rows=tuple(map(_gpu_state, machine.gpus)),
            align="llrrrrrrl",
        ),
        Table(
            caption="", headers=identity, rows=tuple(map(_gpu_identity, machine.gpus))
        ),
        *(paragraph(f"unreadable: {line}") for line in machine.gpu_unreadable),
    )


def _gpu_state(gpu: GpuStatus) -> Row:
    """Return the cells of a GPU in the table of states."""
    facts = gpu.facts
    sample = gpu.sample
    identity = (str(facts.index), facts.name, format_bytes(facts.total_bytes))
    cap = "n/a" if facts.power_cap_w is None else f"{facts.power_cap_w:.0f}"
    if isinstance(sample, Unavailable):
        reason = f"n/a ({sample.reason})"
        return (*identity, None, None, f"n/a / {cap} W", None, None, reason)
    throttled_by = None
    if sample.throttle_reasons is not None:
        throttled_by = ", ".join(sample.throttle_reasons) or "nothing"
    return (
        *identity,
        format_bytes(sample.used_bytes),
        format_share(sample.utilisation),
        f"{format_count(sample.power_w)} / {cap} W",
        _with_unit(sample.sm_clock_mhz, "MHz"),
        _with_unit(sample.temperature_c, "°C"),
        throttled_by,
    )


def _gpu_identity(gpu: GpuStatus) -> Row:
    """Return the cells of a GPU in the table of identities and processes."""
    facts = gpu.facts
    capability = None
    if facts.compute_capability is not None:
        capability = ".".join(map(str, facts.compute_capability))
    mig = {True: "on", False: "off", None: None}[facts.mig_enabled]
    return (
        str(facts.index),
        facts.uuid,
        capability,
        facts.compute_mode,
        mig,
        facts.driver,
        _gpu_processes(gpu),
    )


def _gpu_processes(gpu: GpuStatus) -> str:
    if isinstance(gpu.processes, Unavailable):
        return f"n/a ({gpu.processes.reason})"
    processes = [
        f"{process.pid} ({format_bytes(process.used_bytes)})"
        for process in gpu.processes
    ]
    return ", ".join(processes) or "none visible"


def _speed(bits_per_s: int | None) -> str | None:
    if bits_per_s is None:
        return None
    if bits_per_s >= 10**9:
        return f"{bits_per_s / 1e9:g} Gbit/s"
    return f"{bits_per_s / 1e6:g} Mbit/s"


def _slurm_rows(slurm: SlurmFacts, seconds_left: float | None) -> Iterator[Row]:
    yield "commands on PATH", ", ".join(slurm.commands) or "none"
    yield "inside a job", f"yes, {slurm.job_id}" if slurm.in_job else "no"
    if slurm.in_job:
        yield "nodes", _with_unit(slurm.nodes, "")
        yield "tasks", _with_unit(slurm.tasks, "")
        yield "GPUs per node", _with_unit(slurm.gpus_per_node, "")
        yield "time left", format_seconds(seconds_left)


def _with_unit(value: int | None, unit: str) -> str | None:
    return None if value is None else f"{value} {unit}".rstrip()
