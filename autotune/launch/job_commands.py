"""``autotune job``: hidden commands that job scripts call."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.console.options import (
    REPORTS,
    Data,
    OneProfile,
    Reports,
    RequireApproved,
    gpus_per_node,
    option,
)
from autotune.errors import ProfileRejected, UsageError

Interface = Annotated[
    str | None,
    option("NAME", "Network interface. Default: the one of the node's name."),
]


def preflight(
    *,
    profile: OneProfile,
    data: Data,
    ranks: Annotated[int, gpus_per_node("none")],
    cpus: Annotated[int, option("N", "CPUs that the job requested.", min=1)],
    code: Annotated[
        str, option("HASH", "Hash of the trainer's sources at submission.")
    ],
    require_approved: RequireApproved = False,
    profile_sha256: Annotated[
        str | None,
        option("HASH", "Hash of the profile that was approved at submission."),
    ] = None,
    reports: Reports = REPORTS,
) -> None:
    """Compare this node with profile, code and dataset."""
    from autotune.launch.preflight import describe, problems_of
    from autotune.machine.host import SystemHost
    from autotune.machine.measured_device import look_at_node
    from autotune.profiles import approval
    from autotune.profiles.store import read_trainer_profile
    from trainer.formats.nvml import NvmlMonitor

    if require_approved:
        approval.require_approved(profile, reports, expect_sha256=profile_sha256)
    stored = read_trainer_profile(profile, "train").profile
    with contextlib.closing(NvmlMonitor()) as monitor:
        node = look_at_node(_node_name(), data, SystemHost(), monitor)
    problems = problems_of(stored, node, ranks=ranks, cpus=cpus, code_sha256=code)
    if problems:
        mismatches = "; ".join(
            f"{problem.field} is {problem.found}, expected {problem.expected}"
            for problem in problems
        )
        raise ProfileRejected(
            f"{node.name}: {mismatches}", next_step=problems[0].next_step
        )
    if node.nvlinked is False:
        sys.stderr.write(
            f"warning: {node.name}: not all GPUs are linked by NVLink, so gradient"
            " synchronisation is slower\n"
        )
    print(f"preflight: {describe(node)}")


def meet(
    *,
    job: Annotated[int, option("N", "Job number.", min=0)],
    interface: Interface = None,
) -> None:
    """Print this node's rendezvous address and port."""
    from autotune.cluster.torchrun import (
        choose_port,
        is_free,
        own_address,
        read_addresses,
        resolve_own_name,
    )

    own = own_address(interface, read_addresses(), resolve_own_name())
    port, taken = choose_port(job, lambda port: is_free(own, port))
    if taken:
        sys.stderr.write(
            f"meet: port {', '.join(map(str, taken))} of {_node_name()} is in use;"
            f" using {port}\n"
        )
    print(f"{own}:{port}")


def address(*, interface: Interface = None) -> None:
    """Print this node's address and network interface."""
    from autotune.cluster.torchrun import (
        interface_of,
        own_address,
        read_addresses,
        resolve_own_name,
    )

    addresses = read_addresses()
    own = own_address(interface, addresses, resolve_own_name())
    print(f"{own} {interface_of(own, addresses)}")


def ended(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    *,
    said_before: Annotated[
        str, option("JSON", "Content of exit.json before this start.")
    ] = "",
    job_code: Annotated[int, option("N", "Exit code of srun.")] = 0,
    nodes: Annotated[int, option("N", "Nodes of the job.", min=1)] = 1,
    link: Annotated[
        int | None,
        option("N", "Number of this job in its chain; asks whether to continue."),
    ] = None,
) -> None:
    """Report how a run ended, and exit with its code."""
    from autotune.launch.run_end import (
        PATIENCE_HERE_S,
        PATIENCE_S,
        has_work_left,
        run_end_of,
    )

    if link is None:
        patience_s = PATIENCE_HERE_S if nodes == 1 else PATIENCE_S
        ending = run_end_of(run, said_before, job_code, patience_s=patience_s)
    else:
        ending = has_work_left(run, link)
    sys.stderr.write(f"launch: {ending.words}\n")
    raise typer.Exit(ending.code)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def outside(
    *,
    nodes: Annotated[int, option("N", "Number of nodes.", min=1)],
    script: Annotated[str, option("TEXT", "Bash script to run on each node.")],
) -> None:
    """Run a script on nodes from outside the container."""
    from autotune.cluster.torchrun import STARTER_VARIABLE, start_outside

    if not os.environ.get(STARTER_VARIABLE):
        next_step = "Submit a job instead: autotune train PROFILE --slurm"
        raise UsageError("job outside requires a job script", next_step=next_step)
    raise SystemExit(start_outside(Path(os.environ[STARTER_VARIABLE]), nodes, script))


app = typer.Typer(no_args_is_help=True, help="Commands for job scripts.")
for _command in (preflight, meet, address, outside, ended):
    app.command()(_command)
