"""What a machine is and what would spoil a measurement on it, as text for a terminal."""

from collections.abc import Iterator, Sequence

from autotune.core.hardware import DiskFacts, GpuStatus, HostFacts, MachineFacts, SlurmFacts, Unavailable
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.decide.suitability import Unsuitable
from autotune.show.tables import inert, text_table

_LIBRARIES = ("torch", "transformers", "numpy", "optuna")


def doctor_text(machine: MachineFacts, findings: Sequence[Unsuitable]) -> str:
    """Render the facts, section by section, and then the findings; no final newline."""
    sections = (
        ("Host", _pairs(_host_rows(machine))),
        ("GPUs", "\n".join(_gpu_lines(machine))),
        ("Disks", _disks(machine.host)),
        ("Network", _nics(machine.host)),
        ("SLURM", _pairs(_slurm_rows(machine.slurm, machine.slurm.seconds_left(machine.time_utc)))),
        ("What would spoil a measurement here", "\n".join(_finding_lines(findings))),
    )
    return "\n\n".join(f"{title}\n{_indent(body)}" for title, body in sections)


def _host_rows(machine: MachineFacts) -> Iterator[tuple[str, str | None]]:
    host = machine.host
    quota = "none" if host.cpus_quota is None else f"{host.cpus_quota:g}"
    slurm = "none" if host.cpus_slurm is None else str(host.cpus_slurm)
    limits = f"online {host.cpus_online}, affinity {host.cpus_affinity}, quota {quota}, SLURM {slurm}"
    limit = "" if host.ram_limit_bytes is None else f" of {format_bytes(host.ram_limit_bytes)}"
    yield "platform", host.platform
    yield "CPU", host.cpu_model
    yield "allotted CPUs", f"{host.allotted_cpus} ({limits})"
    yield "load average", f"{format_count(host.load_average_1min, 2)} over 1 min"
    yield "RAM", f"{format_bytes(host.ram_total_bytes)}"
    yield "RAM available", f"{format_bytes(host.ram_available_bytes)}, as limited by {host.ram_limit_source}{limit}"
    yield "/dev/shm free", format_bytes(host.shm_free_bytes)
    yield "Python", host.python_version
    for name in _LIBRARIES:
        yield name, machine.versions.get(name, "not installed")


def _gpu_lines(machine: MachineFacts) -> Iterator[str]:
    if not machine.gpus:
        yield f"none: {inert(machine.gpu_absent)}"
        return
    yield text_table(
        ("GPU", "name", "memory", "used", "busy", "power", "SM clock", "temp.", "throttled by"),
        [_gpu_state(gpu) for gpu in machine.gpus],
        "llrrrrrrl",
    )
    yield ""
    yield text_table(
        ("GPU", "UUID", "compute", "mode", "MIG", "driver", "processes"),
        [_gpu_identity(gpu) for gpu in machine.gpus],
    )
    for line in machine.gpu_unreadable:
        yield f"unreadable: {inert(line)}"


def _gpu_state(gpu: GpuStatus) -> tuple[str | None, ...]:
    facts, sample = gpu.facts, gpu.sample
    head = (str(facts.index), facts.name, format_bytes(facts.total_bytes))
    cap = "n/a" if facts.power_cap_w is None else f"{facts.power_cap_w:.0f}"
    if isinstance(sample, Unavailable):
        return (*head, None, None, f"n/a / {cap} W", None, None, f"n/a ({sample.reason})")
    reasons = None if sample.throttle_reasons is None else ", ".join(sample.throttle_reasons) or "nothing"
    return (
        *head,
        format_bytes(sample.used_bytes),
        format_share(sample.utilisation),
        f"{format_count(sample.power_w)} / {cap} W",
        _with_unit(sample.sm_clock_mhz, "MHz"),
        _with_unit(sample.temperature_c, "°C"),
        reasons,
    )


def _gpu_identity(gpu: GpuStatus) -> tuple[str | None, ...]:
    facts = gpu.facts
    capability = None if facts.compute_capability is None else ".".join(map(str, facts.compute_capability))
    mig = None if facts.mig_enabled is None else "on" if facts.mig_enabled else "off"
    return (str(facts.index), facts.uuid, capability, facts.compute_mode, mig, facts.driver, _users(gpu))


def _users(gpu: GpuStatus) -> str:
    if isinstance(gpu.processes, Unavailable):
        return f"n/a ({gpu.processes.reason})"
    return ", ".join(f"{user.pid} ({format_bytes(user.used_bytes)})" for user in gpu.processes) or "none seen"


def _disks(host: HostFacts) -> str:
    rows = [(disk.path, disk.filesystem_type, _place(disk), format_bytes(disk.free_bytes)) for disk in host.disks]
    return text_table(("path", "file system", "place", "free"), rows, "lllr")


def _place(disk: DiskFacts) -> str | None:
    if disk.filesystem_type is None:
        return None
    return "network" if disk.is_network else "local"


def _nics(host: HostFacts) -> str:
    rows = [
        (nic.name, "up" if nic.is_up else "down", _bit_rate(nic.speed_bits_per_s))
        for nic in host.nics
        if not nic.is_loopback
    ]
    return text_table(("interface", "state", "speed"), rows, "llr") if rows else "none but loopback"


def _slurm_rows(slurm: SlurmFacts, seconds_left: float | None) -> Iterator[tuple[str, str | None]]:
    yield "commands on PATH", ", ".join(slurm.commands) or "none"
    yield "inside a job", f"yes, {slurm.job_id}" if slurm.in_job else "no"
    if slurm.in_job:
        counts = (("nodes", slurm.nodes), ("tasks", slurm.tasks), ("GPUs per node", slurm.gpus_per_node))
        yield from ((name, _with_unit(count, "")) for name, count in counts)
        yield "time left", format_seconds(seconds_left)


def _finding_lines(findings: Sequence[Unsuitable]) -> Iterator[str]:
    if not findings:
        yield "nothing found"
    for finding in findings:
        yield f"{finding.severity + ':':<9}{inert(finding.claim)}"
        yield f"{'':<9}{inert(finding.next_step)}"


def _pairs(rows: Iterator[tuple[str, str | None]]) -> str:
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {inert(value)}" for name, value in pairs)


def _with_unit(value: int | None, unit: str) -> str | None:
    return None if value is None else f"{value} {unit}".rstrip()


def _bit_rate(bits_per_s: int | None) -> str | None:
    if bits_per_s is None:
        return None
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 10**9 else f"{bits_per_s / 1e6:g} Mbit/s"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
