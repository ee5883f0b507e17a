"""Reads this process's place in a SLURM cluster from its environment. Nothing is executed."""

from collections.abc import Callable, Mapping

from autotune.core.hardware import SlurmFacts

_COMMANDS = ("sbatch", "srun", "sinfo")


def read_slurm(environment: Mapping[str, str], which: Callable[[str], str | None]) -> SlurmFacts:
    """Describe the job this process runs in, if any, and the SLURM commands it could call.

    Args:
        environment: The process's environment variables.
        which: Finds a command on PATH, as ``shutil.which`` does.
    """
    end_time = _whole(environment, "SLURM_JOB_END_TIME")
    return SlurmFacts(
        job_id=environment.get("SLURM_JOB_ID") or None,
        end_time_s=None if end_time is None else float(end_time),
        nodes=_first(_whole(environment, "SLURM_JOB_NUM_NODES"), _whole(environment, "SLURM_NNODES")),
        tasks=_whole(environment, "SLURM_NTASKS"),
        gpus_per_node=_first(
            _whole(environment, "SLURM_GPUS_ON_NODE"), _gres_count(environment.get("SLURM_GPUS_PER_NODE", ""))
        ),
        node_name=environment.get("SLURMD_NODENAME") or None,
        commands=tuple(name for name in _COMMANDS if which(name) is not None),
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _gres_count(text: str) -> int | None:
    """Add up a request such as ``2``, ``h100:2`` or ``h100:2,a100:1``; ``None`` if it is none."""
    counts = [part.rpartition(":")[2].strip() for part in text.split(",")]
    return sum(map(int, counts)) if all(count.isascii() and count.isdecimal() for count in counts) else None
