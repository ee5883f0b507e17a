"""Measuring commands keep off login nodes."""

import os
import shlex
import shutil
from collections.abc import Sequence

from autotune.cluster.slurm import read_slurm
from autotune.errors import MachineLacks


def refuse_login_node(command: Sequence[str]) -> None:
    """Keep measurements off a node that many people share, and that is not the one that will train.

    Args:
        command: What was called, to be said again as a job.

    Raises:
        MachineLacks: If jobs can be submitted from here and this is none.
    """
    if not read_slurm(os.environ, shutil.which).is_login_node:
        return
    raise MachineLacks(
        "this looks like a login node (sbatch is on PATH, and this is no SLURM job): measurements belong on a compute "
        "node",
        next_step=f"Submit it: {shlex.join([*command, '--slurm'])}. To measure here all the same: --here.",
    )
