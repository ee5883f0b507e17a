"""``autotune doctor``: facts about this machine, and problems that would spoil a measurement on it."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from autotune.base.clock import Clock, SystemClock
from autotune.cluster.slurm import read_slurm
from autotune.console.options import AsJson, option
from autotune.machine.decide import find_unsuitable
from autotune.machine.host import Host, SystemHost
from autotune.machine.nvml import GpuMonitor, NvmlMonitor, gpus_of_torch
from autotune.machine.sections import doctor_text
from autotune.machine.values import GpuStatus, MachineFacts, SlurmFacts

NEXT_COMMAND = "autotune data prepare elf:/usr/bin --out DIR"


def doctor(
    *,
    as_json: AsJson = False,
    path: Annotated[
        list[Path] | None, option("DIR", "Directory whose disk to check; repeatable. Default: the current one.")
    ] = None,
) -> None:
    """Check this machine for measurement problems."""
    monitor = NvmlMonitor()
    try:
        slurm = read_slurm(os.environ, shutil.which)
        machine = examine(SystemHost(), monitor, slurm, SystemClock(), path or [Path()])
    finally:
        monitor.close()
    print(render(machine, as_json=as_json))


def examine(host: Host, monitor: GpuMonitor, slurm: SlurmFacts, clock: Clock, paths: Sequence[Path]) -> MachineFacts:
    """Read all facts once.

    Raises:
        MachineLacks: If the host does not describe itself the way Linux does.
    """
    gpus = tuple(
        GpuStatus(facts=gpu, sample=monitor.sample(gpu.uuid), processes=monitor.compute_processes(gpu.uuid))
        for gpu in monitor.devices()
    )
    absent = monitor.why_absent()
    unreadable = () if absent is None else tuple(f"{name}: {absent}" for name in gpus_of_torch())
    return MachineFacts(
        time_utc=clock.utc_now(),
        host=host.facts(paths),
        gpus=gpus,
        gpu_absent=absent,
        gpu_unreadable=monitor.unreadable() or unreadable,
        slurm=slurm,
        versions=host.library_versions(),
    )


def render(machine: MachineFacts, *, as_json: bool) -> str:
    """Return the machine, its problems and the next command, as text or as one JSON object."""
    findings = find_unsuitable(machine)
    if as_json:
        from autotune.base.document import answer_json

        answer = {
            "machine": machine,
            "allotted_cpus": machine.host.allotted_cpus,
            "in_job": machine.slurm.in_job,
            "is_login_node": machine.slurm.is_login_node,
            "seconds_left": machine.slurm.seconds_left(machine.time_utc),
        }
        return answer_json(answer | {"findings": findings, "next": NEXT_COMMAND})
    return f"{doctor_text(machine, findings)}\n\nnext: {NEXT_COMMAND}"
