"""Facts about the SLURM job that this process is in."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """SLURM job of this process, and available SLURM commands.

    Without a job, its facts are None.
    """

    job_id: str | None
    end_time_s: float | None
    """Time at which the job ends, in Unix time; None if it is not known."""
    nodes: int | None
    tasks: int | None
    gpus_per_node: int | None
    commands: tuple[str, ...]
    """SLURM commands on PATH."""
    node_name: str | None = None
    """Name of the node, which its daemon sets for processes that it starts. A shell
    that ``salloc`` opened on the login node has none."""

    @property
    def in_job(self) -> bool:
        """True if this process runs inside a SLURM job."""
        return self.job_id is not None

    @property
    def is_login_node(self) -> bool:
        """True on a login node.

        Jobs can be submitted from there, and this process does not run on a job's node.
        """
        return "sbatch" in self.commands and (not self.in_job or self.node_name is None)

    def seconds_left(self, now_utc: datetime) -> float | None:
        """Return the seconds until the job's end, 0 once it has passed.

        Returns:
            The seconds, or None if no end is known.
        """
        if self.end_time_s is None:
            return None
        return max(0.0, self.end_time_s - now_utc.timestamp())
