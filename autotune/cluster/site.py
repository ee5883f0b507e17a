"""The site file: one TOML file with the facts of a cluster that no program can find out."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer.schema import Table, parse_table, read_toml

OneLine = Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]


class SlurmSettings(Table):
    """What ``sbatch`` is told."""

    account: OneLine | None = None
    partition: OneLine | None = None
    constraint: OneLine | None = None
    exclude: OneLine | None = None
    gres: OneLine | None = None
    """How GPUs are asked for here, such as ``gpu:h100:{count}``."""
    cpus_per_task: Annotated[int, Field(gt=0)] = 1
    memory_mib_per_cpu: Annotated[int, Field(gt=0)] = 2048
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")] = "04:00:00"
    """Longest time of a job."""


class NetworkSettings(Table):
    """How nodes reach each other."""

    interface: OneLine | None = None
    """Such as ``ib0``; None leaves the choice to the libraries."""
    nccl: dict[str, OneLine] = Field(default_factory=dict)
    """Environment variables for NCCL."""


class SiteFile(Table):
    """A cluster."""

    prologue: list[OneLine] = Field(default_factory=list)
    """Shell lines before anything runs, such as ``module load python``."""
    command_prefix: OneLine = ""
    """Before every command, such as ``apptainer exec --nv image.sif``."""
    node_local_path: OneLine | None = None
    """A directory on every node's own disk, such as ``/local``."""
    slurm: SlurmSettings = SlurmSettings()
    network: NetworkSettings = NetworkSettings()


def read_site(path: Path) -> SiteFile:
    """Read a site file.

    Raises:
        BadConfig: If it is missing, not TOML, or holds something unknown.
    """
    return parse_table(SiteFile, read_toml(path), where=str(path))
