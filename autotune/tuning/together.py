"""What stages share that measure with ranks of several nodes: where they run, and the machine that runs them."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster.torchrun import STARTER_VARIABLE, on_nodes_of_job, on_this_node
from autotune.errors import BadInput, MachineLacks
from autotune.measure.together import TogetherMachine
from autotune.search.site import DeviceChoice, local_ranks
from autotune.tuning.bench import Bench, site_here
from trainer.dataset import read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherBench(Bench):
    """Ranks that have joined, at the site of the first node."""

    nodes: int
    ranks_per_node: int


def nodes_here() -> int:
    """Of the SLURM job that this process is in; 1 outside of one."""
    told = os.environ.get("SLURM_NNODES") or os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    return int(told) if told.isdecimal() and os.environ.get("SLURM_JOB_ID") else 1


@contextlib.contextmanager
def open_together(
    choice: DeviceChoice, data_dir: Path, scratch_parent: Path, nodes: int, ranks: int | None, *, alone: bool = False
) -> Iterator[TogetherBench]:
    """Start ranks on this node, or on the first nodes of this job, and let them find each other.

    A single rank is an error unless ``alone``. Requests and answers are exchanged in ``scratch_parent``, which all
    nodes should see.

    Raises:
        BadInput: If the job has fewer nodes.
        MachineLacks: If the device, torch or srun is missing, there is one rank only, or they do not find each other.
    """
    there = nodes_here()
    if nodes > there:
        raise BadInput(
            f"{nodes} nodes, and there {'is 1' if there == 1 else f'are {there}'} here",
            next_step=f"Submit it as a job of {nodes} nodes: add --slurm.",
        )
    with site_here(choice, data_dir, ("torch",)) as (site, _):
        each = local_ranks(site, ranks)
        if nodes * each < 2 and not alone:
            raise MachineLacks(
                "one rank alone sends nothing",
                next_step="Give several ranks (--ranks 2), or submit it as a job of two nodes: --slurm. Without any, "
                "autotune scale predicts from an assumed card: --bandwidth 25Gbit.",
            )
        if nodes > 1 and shutil.which("srun") is None and not os.environ.get(STARTER_VARIABLE):
            raise MachineLacks(
                "srun is not here",
                next_step="Submit the command with --slurm and a site file that names the container as command_prefix "
                "(which must pass the environment on), or measure on one node: --nodes 1.",
            )
        manifest, arguments = read_manifest(data_dir), (each, site.versions["torch"])
        start = on_this_node(*arguments) if nodes == 1 else on_nodes_of_job(nodes, *arguments)
        scratch_parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".together-", dir=scratch_parent))
        with TogetherMachine(start, site.device, scratch) as ranks_together:
            sys.stderr.write(
                f"measuring on {site.words}; starting {nodes * each} ranks on {nodes} node{'s' * (nodes > 1)}\n"
            )
            ranks_together.start()
            yield TogetherBench(
                site=site, manifest=manifest, server=ranks_together, machine=ranks_together, nodes=nodes,
                ranks_per_node=each,
            )  # fmt: skip
