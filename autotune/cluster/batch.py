"""A measuring command as one SLURM job: a readable script, submitted with ``sbatch``."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from autotune.cluster.site import SiteFile
from autotune.errors import MachineLacks

SUBMIT_TIMEOUT_S = 60.0
DEFAULT_GRES = "gpu:{count}"


def batch_script(site: SiteFile, command: Sequence[str], *, name: str, gpus: int, cpus: int, log: Path) -> str:
    """One node, one task, as many GPUs and CPUs as are asked for. Pure.

    Args:
        site: What this cluster wants said.
        command: What runs; nothing in it is expanded by the shell.
        name: Of the job.
        gpus: 0 asks for none.
        cpus: Of the task.
        log: Where its output goes.
    """
    slurm = site.slurm
    directives = {
        "job-name": name,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(cpus),
        "gres": (slurm.gres or DEFAULT_GRES).format(count=gpus) if gpus else None,
        "mem-per-cpu": f"{slurm.memory_mib_per_cpu}M",
        "time": slurm.time,
        "account": slurm.account,
        "partition": slurm.partition,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "output": str(log),
    }
    lines = [f"#SBATCH --{option}={shlex.quote(value)}" for option, value in directives.items() if value is not None]
    inner = " ".join([site.command_prefix, shlex.join(command)]).strip()
    return "\n".join(
        [
            "#!/bin/bash",
            "# Measures on a compute node. Started again it goes on from its ledger.",
            *lines,
            "set -euo pipefail",
            *site.prologue,
            "# srun does not inherit --cpus-per-task since SLURM 22.05.",
            f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {inner}',
            "",
        ]
    )


def submit(script: Path) -> str:
    """Submit a script; gives the job's id.

    Raises:
        MachineLacks: If there is no ``sbatch``, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise MachineLacks(
            "cannot submit the job: sbatch is not here",
            next_step=f"Run this on a login node of the cluster; the script is {script}.",
        )
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False, timeout=SUBMIT_TIMEOUT_S
    )
    job = re.match(r"\d+", done.stdout.strip())
    if done.returncode or job is None:
        raise MachineLacks(
            f"sbatch refused the job: {(done.stderr or done.stdout).strip()[:500]}",
            next_step=f"Change the site file, or {script}, and submit that by hand: sbatch {script}",
        )
    return job[0]
