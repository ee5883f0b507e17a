"""Workers as SLURM jobs, through dask-jobqueue: what the site file says becomes that library's settings."""

import contextlib
import importlib.util
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.cluster.site import SiteFile, read_site
from autotune.errors import MachineLacks

_MIB = 2**20


def job_settings(site: SiteFile, worker_memory_bytes: int, log_directory: Path) -> dict[str, Any]:
    """Keyword arguments of ``dask_jobqueue.SLURMCluster``: one job of one worker process each. Pure."""
    slurm = site.slurm
    directives = {"constraint": slurm.constraint, "exclude": slurm.exclude}
    said = [f"--{name}={value}" for name, value in directives.items() if value]
    # What the worker may take, and as much for the extraction process beside it.
    memory_mib = 2 * worker_memory_bytes // _MIB
    return {
        "cores": 1,
        "processes": 1,
        "job_cpu": slurm.cpus_per_task,
        "memory": f"{memory_mib}MiB",
        "job_mem": slurm.mem or f"{max(memory_mib, slurm.memory_mib_per_cpu * slurm.cpus_per_task)}M",
        "account": slurm.account,
        "queue": slurm.partition,
        "walltime": slurm.time,
        "interface": site.network.interface,
        "python": " ".join([site.command_prefix, shlex.quote(site.python or sys.executable)]).strip(),
        "job_script_prologue": list(site.prologue),
        "job_extra_directives": said + slurm.extra,
        "log_directory": str(log_directory),
        "local_directory": site.node_local_path,
        "scheduler_options": {"dashboard_address": None},
    }


@contextlib.contextmanager
def slurm_cluster(site_file: Path, jobs: int, worker_memory_bytes: int, log_directory: Path) -> Iterator[Any]:
    """Submit jobs of one worker each; they are cancelled at the end. Gives the dask cluster.

    Raises:
        BadConfig: If the site file cannot be used.
        MachineLacks: If dask-jobqueue or ``sbatch`` is missing.
    """
    site = read_site(site_file)
    if importlib.util.find_spec("dask_jobqueue") is None:
        raise MachineLacks(
            "submitting workers needs dask-jobqueue, not installed here",
            next_step="Run: pip install 'encoder-autotune[slurm]'",
        )
    if shutil.which("sbatch") is None:
        raise MachineLacks(
            "cannot submit jobs: sbatch is not here", next_step="Run this on a login node of the cluster."
        )
    with _own_handler():
        from dask_jobqueue.slurm import SLURMCluster

    cluster = SLURMCluster(**job_settings(site, worker_memory_bytes, log_directory))
    try:
        cluster.scale(jobs=jobs)
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """Keep what Ctrl-C does here: the library takes it over when it is imported, and would end with code 0."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
