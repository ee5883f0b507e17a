"""The site file: one TOML file with the settings of a cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from trainer.formats.cpu_environment import NUMA_VARIABLE
from trainer.formats.slurm_time import parse_slurm_time_s
from trainer.formats.tables import StrictTable, parse_table, read_toml

SITE_VARIABLE = "AUTOTUNE_SITE"
"""Environment variable with the path of the site file."""
SITE_FILE = "site.toml"
"""Name of a site file in the working directory."""
DEFAULT_SITE = ""
"""Value of ``--slurm`` without a file: the site file is searched for."""

OneLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SlurmSettings(StrictTable):
    """Options of ``sbatch``."""

    account: OneLine | None = None
    """Account that jobs are charged to."""
    partition: OneLine | None = None
    """Partition of jobs."""
    constraint: OneLine | None = None
    """Features that nodes must have."""
    exclude: OneLine | None = None
    """Nodes that jobs must not use."""
    distribution: OneLine | None = None
    """Distribution of tasks, such as ``nopack``."""
    gres: OneLine | None = None
    """Request for GPUs on this cluster, such as ``gpu:h100:{count}``."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per node, for commands that do not set their number."""
    cpus_per_task: PositiveInt = 1
    """CPU cores of a node's task without ``cpus_per_rank``; 1 uses the profile's
    number, if there is a profile."""
    cpus_per_rank: PositiveInt | None = None
    """CPU cores per GPU; a job requests this times the GPUs per node."""
    memory_mib_per_cpu: PositiveInt = 2048
    """Memory of a job per CPU core, in MiB."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory per node in the format of ``--mem``, instead of ``memory_mib_per_cpu``;
    ``0`` requests all."""
    # [days-]hours:minutes:seconds is SLURM's only unambiguous time format.
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,3}:\d{2}:\d{2}$")] = "04:00:00"
    """Time limit of jobs."""
    requeue: bool = True
    """True if training jobs may be requeued; if false, use a chain of jobs
    (``--chain``)."""
    term_lead_s: Annotated[int, Field(ge=60)] | None = None
    """Seconds before its end at which a training job gets SIGTERM; by default, enough
    to save a checkpoint."""
    extra: list[OneLine] = Field(default_factory=list)
    """Further options of ``sbatch``, such as ``--reservation=course``."""

    @property
    def time_s(self) -> float:
        """Time limit of jobs, in seconds."""
        seconds = parse_slurm_time_s(self.time)
        assert seconds is not None  # the pattern is narrower than SLURM's format
        return seconds


class NetworkSettings(StrictTable):
    """Network between nodes."""

    interface: OneLine | None = None
    """Network interface, such as ``ib0``; by default, NCCL and gloo choose."""
    nccl: dict[Variable, OneLine] = Field(default_factory=dict)
    """Environment variables for NCCL."""


class Templates(StrictTable):
    """Jinja templates that replace the built-in ones, relative to the site file."""

    measure: OneLine | None = None
    """Template of measuring jobs."""
    train: OneLine | None = None
    """Template of training jobs."""


class SiteFile(StrictTable):
    """Settings of a cluster."""

    prologue: list[OneLine] = Field(default_factory=list)
    """Shell lines that run first, such as ``module load python``."""
    command_prefix: OneLine = ""
    """Prefix of every command, such as ``apptainer exec --nv image.sif``."""
    python: OneLine | None = None
    """Python interpreter inside jobs; by default, the one that submits."""
    node_local_path: OneLine | None = None
    """Directory on every node's local disk, such as ``/local`` or ``$TMPDIR``, to stage
    datasets on."""
    numa_binding: bool = True
    """True if jobs bind each process, in training and in trials, to the CPU cores near
    its GPU."""
    require_approved: bool = False
    """True if training jobs require an approved profile."""
    slurm: SlurmSettings = SlurmSettings()
    network: NetworkSettings = NetworkSettings()
    templates: Templates = Templates()


def read_site(path: Path) -> SiteFile:
    """Read a site file.

    Raises:
        BadConfig: If it is missing, not TOML, or has unknown keys or invalid values.
    """
    return parse_table(SiteFile, read_toml(path), where=str(path))


def find_site(
    path_text: str, environment: Mapping[str, str]
) -> tuple[SiteFile, Path | None]:
    """Read the site file: the given one, else ``AUTOTUNE_SITE``, else ``site.toml``.

    ``site.toml`` is looked for in the working directory.

    Args:
        path_text: Path of the site file; ``DEFAULT_SITE`` to search for it.
        environment: Environment variables.

    Returns:
        The settings and the path of the file. Without any file, the default settings
        and None.

    Raises:
        BadConfig: As for ``read_site``.
    """
    named = path_text or environment.get(SITE_VARIABLE)
    path = Path(named or SITE_FILE)
    if named or path.is_file():
        return read_site(path), path
    return SiteFile(), None


def job_variables(site: SiteFile) -> dict[str, str]:
    """Return the environment variables that the site sets in its jobs.

    They are for NCCL, gloo and CPU binding. This function is pure.
    """
    variables: dict[str, str] = {}
    if site.network.interface:
        variables["NCCL_SOCKET_IFNAME"] = site.network.interface
        variables["GLOO_SOCKET_IFNAME"] = site.network.interface
    if not site.numa_binding:
        variables[NUMA_VARIABLE] = "0"
    return variables | site.network.nccl
