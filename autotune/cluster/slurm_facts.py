"""Facts about the SLURM job that this process is in."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """SLURM job of this process, and available SLURM commands.

    ``end_time_s`` is Unix time; ``commands`` are those found on PATH. ``node_name`` is
    set by the node's own daemon for processes that it starts; a shell that ``salloc``
    opened on the login node has none.
    """

    job_id: str | None
    end_time_s: float | None
    nodes: int | None
    tasks: int | None
    gpus_per_node: int | None
    commands: tuple[str, ...]
    node_name: str | None = None

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
        return (
            None
            if self.end_time_s is None
            else max(0.0, self.end_time_s - now_utc.timestamp())
        )
