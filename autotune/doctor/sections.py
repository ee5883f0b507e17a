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
from autotune.machine.values import GpuStatus, MachineFacts
from trainer.formats.gpus import Unavailable


def doctor_text(machine: MachineFacts, findings: Sequence[Unsuitable]) -> str:
    """Render the facts, section by section, and then the findings.

    There is no final newline.
    """
    host, slurm = machine.host, machine.slurm
    disks = table_of(
        "",
        host.disks,
        ("path", "l", lambda disk: disk.path),
        ("file system", "l", lambda disk: disk.filesystem_type),
        (
            "place",
            "l",
            lambda disk: (
                disk.filesystem_type and ("network" if disk.is_network else "local")
            ),
        ),
        ("free", "r", lambda disk: format_bytes(disk.free_bytes)),
    )
    nics = table_of(
        "",
        [nic for nic in host.nics if not nic.is_loopback],
        ("interface", "l", lambda nic: nic.name),
        ("state", "l", lambda nic: "up" if nic.is_up else "down"),
        ("speed", "r", lambda nic: _speed(nic.speed_bits_per_s)),
    )
    said = [
        text
        for one in findings
        for text in (f"{one.severity}: {one.claim}", f"  {one.next_step}")
    ]
    found = Bullets(items=tuple((text,) for text in said))
    sections: dict[str, tuple[Block, ...]] = {
        "Host": (facts_table("", list(_host_rows(machine))),),
        "GPUs": _gpus(machine),
        "Disks": (disks,),
        "Network": (nics if nics.rows else paragraph("loopback only"),),
        "SLURM": (
            facts_table(
                "", list(_slurm_rows(slurm, slurm.seconds_left(machine.time_utc)))
            ),
        ),
        "Problems for measurements": (found if findings else paragraph("none found"),),
    }
    return console_text(
        [
            Section(title=title, key="", blocks=blocks)
            for title, blocks in sections.items()
        ]
    )


def _host_rows(machine: MachineFacts) -> Iterator[Row]:
    host = machine.host
    quota = "none" if host.cpus_quota is None else f"{host.cpus_quota:g}"
    slurm = "none" if host.cpus_slurm is None else str(host.cpus_slurm)
    limits = (
        f"online {host.cpus_online}, affinity {host.cpus_affinity}, quota {quota},"
        f" SLURM {slurm}"
    )
    limit = (
        ""
        if host.ram_limit_bytes is None
        else f" of {format_bytes(host.ram_limit_bytes)}"
    )
    yield "platform", host.platform
    yield "CPU", host.cpu_model
    yield "available CPU cores", f"{host.allotted_cpus} ({limits})"
    yield "load average", f"{format_count(host.load_average_1min, 2)} over 1 min"
    yield "RAM", f"{format_bytes(host.ram_total_bytes)}"
    yield (
        "RAM available",
        (
            f"{format_bytes(host.ram_available_bytes)}, as limited by"
            f" {host.ram_limit_source}{limit}"
        ),
    )
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
        *(paragraph(f"unreadable: {one}") for one in machine.gpu_unreadable),
    )


def _gpu_state(gpu: GpuStatus) -> Row:
    facts, sample = gpu.facts, gpu.sample
    head = (str(facts.index), facts.name, format_bytes(facts.total_bytes))
    cap = "n/a" if facts.power_cap_w is None else f"{facts.power_cap_w:.0f}"
    if isinstance(sample, Unavailable):
        return (
            *head,
            None,
            None,
            f"n/a / {cap} W",
            None,
            None,
            f"n/a ({sample.reason})",
        )
    reasons = (
        None
        if sample.throttle_reasons is None
        else ", ".join(sample.throttle_reasons) or "nothing"
    )
    busy, power = (
        format_share(sample.utilisation),
        f"{format_count(sample.power_w)} / {cap} W",
    )
    clock, heat = (
        _with_unit(sample.sm_clock_mhz, "MHz"),
        _with_unit(sample.temperature_c, "°C"),
    )
    return (*head, format_bytes(sample.used_bytes), busy, power, clock, heat, reasons)


def _gpu_identity(gpu: GpuStatus) -> Row:
    facts = gpu.facts
    capability = (
        None
        if facts.compute_capability is None
        else ".".join(map(str, facts.compute_capability))
    )
    mig = None if facts.mig_enabled is None else "on" if facts.mig_enabled else "off"
    if isinstance(gpu.processes, Unavailable):
        users = f"n/a ({gpu.processes.reason})"
    else:
        users = (
            ", ".join(
                f"{user.pid} ({format_bytes(user.used_bytes)})"
                for user in gpu.processes
            )
            or "none visible"
        )
    return (
        str(facts.index),
        facts.uuid,
        capability,
        facts.compute_mode,
        mig,
        facts.driver,
        users,
    )


def _speed(bits_per_s: int | None) -> str | None:
    if bits_per_s is None:
        return None
    return (
        f"{bits_per_s / 1e9:g} Gbit/s"
        if bits_per_s >= 10**9
        else f"{bits_per_s / 1e6:g} Mbit/s"
    )


def _slurm_rows(slurm: SlurmFacts, seconds_left: float | None) -> Iterator[Row]:
    yield "commands on PATH", ", ".join(slurm.commands) or "none"
    yield "inside a job", f"yes, {slurm.job_id}" if slurm.in_job else "no"
    if slurm.in_job:
        counts = (
            ("nodes", slurm.nodes),
            ("tasks", slurm.tasks),
            ("GPUs per node", slurm.gpus_per_node),
        )
        yield from ((name, _with_unit(count, "")) for name, count in counts)
        yield "time left", format_seconds(seconds_left)


def _with_unit(value: int | None, unit: str) -> str | None:
    return None if value is None else f"{value} {unit}".rstrip()
