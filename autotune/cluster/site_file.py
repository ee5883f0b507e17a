"""The site file: one TOML file with the facts of a cluster that no program can find out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer.config.tables import StrictTable, parse_table, read_toml
from trainer.distributed.cpu_binding import NUMA_VARIABLE
from trainer.health.watchdog import parse_slurm_time_s

SITE_VARIABLE, SITE_FILE = "AUTOTUNE_SITE", "site.toml"
DEFAULT_SITE = ""
"""What ``--slurm`` without a file means: the site file that is found."""

TIME_PATTERN = r"^(\d+-)?\d{1,3}:\d{2}:\d{2}$"
"""``[days-]hours:minutes:seconds``: of what SLURM takes, the one spelling that nobody misreads."""

OneLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Positive = Annotated[int, Field(gt=0)]


class SlurmSettings(StrictTable):
    """What ``sbatch`` is told."""

    account: OneLine | None = None
    """Who pays."""
    partition: OneLine | None = None
    """Where jobs go."""
    constraint: OneLine | None = None
    """Features that nodes must have."""
    exclude: OneLine | None = None
    """Nodes that jobs must not get."""
    distribution: OneLine | None = None
    """How tasks are laid out, such as ``nopack``."""
    gres: OneLine | None = None
    """How GPUs are asked for here, such as ``gpu:h100:{count}``."""
    gpus_per_node: Positive | None = None
    """What a node has, where a command does not say how many it wants."""
    cpus_per_task: Positive = 1
    """Of a job of one process; measuring jobs take those of the profile, where there is one and this is 1."""
    cpus_per_rank: Positive | None = None
    """Of each GPU's process; a job asks for as many times that as it has ranks on a node."""
    memory_mib_per_cpu: Positive = 2048
    """Memory of a job for each of its processors."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of a node as ``--mem`` spells it, instead; ``0`` is all of it."""
    time: Annotated[str, Field(pattern=TIME_PATTERN)] = "04:00:00"
    """Longest time of a job."""
    requeue: bool = True
    """Whether jobs may be put back into the queue; where not, training goes on by a chain of jobs."""
    term_lead_s: Annotated[int, Field(ge=60)] | None = None
    """How long before its end a training job is told. None: as long as its checkpoint should take."""
    extra: list[OneLine] = Field(default_factory=list)
    """Any other options of ``sbatch``, such as ``--reservation=course``."""

    @property
    def time_s(self) -> float:
        """Longest time of a job, in seconds."""
        seconds = parse_slurm_time_s(self.time)
        assert seconds is not None  # the pattern is narrower than what SLURM takes
        return seconds


class NetworkSettings(StrictTable):
    """How nodes reach each other."""

    interface: OneLine | None = None
    """Such as ``ib0``; None leaves the choice to the libraries."""
    nccl: dict[Variable, OneLine] = Field(default_factory=dict)
    """Environment variables for NCCL."""


class Templates(StrictTable):
    """Jinja templates instead of this project's own; relative to the site file."""

    measure: OneLine | None = None
    """Of jobs that measure."""
    train: OneLine | None = None
    """Of jobs that train."""


class SiteFile(StrictTable):
    """A cluster."""

    prologue: list[OneLine] = Field(default_factory=list)
    """Shell lines before anything runs, such as ``module load python``."""
    command_prefix: OneLine = ""
    """Before every command, such as ``apptainer exec --nv image.sif``."""
    python: OneLine | None = None
    """The interpreter inside jobs. None: the one that submits."""
    node_local_path: OneLine | None = None
    """A directory on every node's own disk, such as ``/local`` or ``$TMPDIR``."""
    numa_binding: bool = True
    """Whether jobs bind each rank, in training and in trials, to the processors that are near its GPU."""
    require_approved: bool = False
    """Whether jobs train only from profiles that somebody has approved, whatever is asked for."""
    slurm: SlurmSettings = SlurmSettings()
    network: NetworkSettings = NetworkSettings()
    templates: Templates = Templates()


def read_site(path: Path) -> SiteFile:
    """Read a site file.

    Raises:
        BadConfig: If it is missing, not TOML, or holds something unknown.
    """
    return parse_table(SiteFile, read_toml(path), where=str(path))


def find_site(asked: str, environment: Mapping[str, str]) -> Path | None:
    """Where the site file is: as asked, else ``AUTOTUNE_SITE``, else ``site.toml`` here; None for none at all."""
    if asked != DEFAULT_SITE:
        return Path(asked)
    if environment.get(SITE_VARIABLE):
        return Path(environment[SITE_VARIABLE])
    here = Path(SITE_FILE)
    return here if here.is_file() else None


def job_variables(site: SiteFile) -> dict[str, str]:
    """Return the environment variables that the site sets in its jobs: of NCCL and gloo, and of binding. Pure."""
    network = site.network
    chosen = {name: network.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if network.interface}
    binding = {} if site.numa_binding else {NUMA_VARIABLE: "0"}
    return {name: value for name, value in chosen.items() if value is not None} | binding | network.nccl
