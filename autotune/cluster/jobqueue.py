"""Workers as SLURM jobs, through dask-jobqueue: what the site file says becomes that library's settings."""

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.cluster.site import SiteFile, read_site
from autotune.corpus.engine import WORKER_MEMORY_BYTES, Engine, cluster_engine
from autotune.corpus.workplace import Workplace
from autotune.errors import MachineLacks

DEFAULT_JOBS = 8
_MIB = 2**20


def job_settings(site: SiteFile, log_directory: Path) -> dict[str, Any]:
    """Keyword arguments of ``dask_jobqueue.SLURMCluster``: one job of one worker process each. Pure."""
    slurm = site.slurm
    directives = {"constraint": slurm.constraint, "exclude": slurm.exclude}
    python = " ".join([site.command_prefix, shlex.quote(sys.executable)]).strip()
    return {
        "cores": 1,
        "processes": 1,
        "job_cpu": slurm.cpus_per_task,
        # What a worker may take, and the extraction process beside it.
        "memory": f"{2 * WORKER_MEMORY_BYTES // _MIB}MiB",
        "job_mem": f"{max(2 * WORKER_MEMORY_BYTES // _MIB, slurm.memory_mib_per_cpu * slurm.cpus_per_task)}M",
        "account": slurm.account,
        "queue": slurm.partition,
        "walltime": slurm.time,
        "interface": site.network.interface,
        "python": python,
        "job_script_prologue": list(site.prologue),
        "job_extra_directives": [f"--{name}={value}" for name, value in directives.items() if value],
        "log_directory": str(log_directory),
        "local_directory": site.node_local_path,
        "scheduler_options": {"dashboard_address": None},
    }


@contextlib.contextmanager
def slurm_cluster(site_file: Path, workplace: Workplace, jobs: int | None) -> Iterator[Engine]:
    """Submit jobs and use them as workers; they are cancelled at the end.

    Raises:
        BadConfig: If the site file cannot be used.
        MachineLacks: If dask-jobqueue or ``sbatch`` is missing, or a worker does not see the work directory.
    """
    site = read_site(site_file)
    if importlib.util.find_spec("dask_jobqueue") is None:
        raise MachineLacks(
            "submitting workers needs dask-jobqueue, not installed here",
            next_step="Run: pip install 'encoder-autotune[slurm]'",
        )
    from dask_jobqueue.slurm import SLURMCluster

    wanted = jobs or DEFAULT_JOBS
    cluster = SLURMCluster(**job_settings(site, workplace.path / "jobs"))
    try:
        cluster.scale(jobs=wanted)
        with cluster_engine(workplace, cluster, wanted) as engine:
            yield engine
    except FileNotFoundError as error:
        raise MachineLacks(
            f"cannot submit jobs: {error.filename} is not here", next_step="Run this on a login node of the cluster."
        ) from error
    finally:
        cluster.close()
