"""``autotune doctor``: facts about this machine, and measurement problems."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from autotune.base.clock import Clock, SystemClock
from autotune.cluster.slurm import read_slurm
from autotune.cluster.slurm_facts import SlurmFacts
from autotune.console.options import AsJson, flag, option
from autotune.doctor.sections import doctor_text
from autotune.machine.decide import find_unsuitable
from autotune.machine.host import Host, SystemHost
from autotune.machine.torch_gpus import gpus_of_torch
from autotune.machine.values import GpuStatus, MachineFacts
from autotune.speed.values import MachineRates
from trainer.formats.nvml import GpuMonitor, NvmlMonitor

NEXT_COMMAND = "autotune data prepare elf:/usr/bin --out DIR"


def doctor(
    *,
    as_json: AsJson = False,
    path: Annotated[
        list[Path] | None,
        option(
            "DIR",
            "Directory whose disk to check; repeatable. Default: the current one.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        flag(
            "--measure",
            "Also measure speed constants, for predictions; takes a minute.",
        ),
    ] = False,
) -> None:
    """Check this machine for measurement problems.

    With --measure, write the speed of matmuls, memory and launches to
    reports/machines/, from where estimate and plan read them.
    """
    with contextlib.closing(NvmlMonitor()) as monitor:
        machine = examine(
            SystemHost(), monitor, read_slurm(), SystemClock(), path or [Path()]
        )
    rates = _measure_rates(machine) if measure else None
    print(render(machine, rates, as_json=as_json))


def _measure_rates(machine: MachineFacts) -> MachineRates:
    """Measure the machine's speed constants, and write them to a file."""
    from autotune.speed.measure import measure_rates, write_rates
    from autotune.trials.fork_server import ForkServerMachine
    from trainer.formats.progress import progress

    gpu = machine.gpus[0].facts.name if machine.gpus else None
    device: Literal["cpu", "cuda"] = "cpu" if gpu is None else "cuda"
    with ForkServerMachine(device=device) as trials, progress("doctor") as update:
        update(0, None, "measuring this machine's speed")
        trials.start()
        rates = measure_rates(
            trials,
            device,
            gpu or machine.host.cpu_model or "cpu",
            when_utc=machine.time_utc.isoformat(),
        )
    write_rates(rates)
    return rates


def examine(
    host: Host,
    monitor: GpuMonitor,
    slurm: SlurmFacts,
    clock: Clock,
    paths: Sequence[Path],
) -> MachineFacts:
    """Read all facts once.

    Raises:
        MachineLacks: If the host does not describe itself the way Linux does.
    """
    gpus = tuple(
        GpuStatus(
            facts=gpu,
            sample=monitor.sample(gpu.uuid),
            processes=monitor.compute_processes(gpu.uuid),
        )
        for gpu in monitor.devices()
    )
    absent = monitor.why_absent()
    # If NVML sees no GPU but PyTorch does, NVML is broken.
    names_in_torch = () if absent is None else gpus_of_torch()
    unreadable = tuple(f"{name}: {absent}" for name in names_in_torch)
    return MachineFacts(
        time_utc=clock.utc_now(),
        host=host.facts(paths),
        gpus=gpus,
        gpu_absent=absent,
        gpu_unreadable=monitor.unreadable() or unreadable,
        slurm=slurm,
        versions=host.library_versions(),
        conflicting_distributions=host.conflicting_distributions(),
    )


def render(
    machine: MachineFacts, rates: MachineRates | None = None, *, as_json: bool
) -> str:
    """Return the machine, its problems and the next command, as text or JSON."""
    findings = find_unsuitable(machine)
    if as_json:
        from autotune.base.answer_json import answer_json

        answer = {
            "machine": machine,
            "allotted_cpus": machine.host.allotted_cpus,
            "in_job": machine.slurm.in_job,
            "is_login_node": machine.slurm.is_login_node,
            "seconds_left": machine.slurm.seconds_left(machine.time_utc),
            "findings": findings,
            "rates": rates,
            "next": NEXT_COMMAND,
        }
        return answer_json(answer)
    text = doctor_text(machine, findings)
    if rates is not None:
        from autotune.speed.measure import rates_path
        from autotune.speed.sections import rates_text

        text += f"\n\n{rates_text(rates, rates_path(rates.device))}"
    return f"{text}\n\nnext: {NEXT_COMMAND}"
