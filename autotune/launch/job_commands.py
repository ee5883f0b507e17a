"""``autotune job``: hidden commands that job scripts call."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.console.options import REPORTS, Reports
from autotune.errors import ProfileRejected, UsageError

Interface = Annotated[str | None, typer.Option(help="Network interface. Default: the one of the node's name.")]


def preflight(
    *,
    profile: Annotated[Path, typer.Option(help="The profile that is to be trained from.")],
    data: Annotated[Path, typer.Option(help="The dataset, as this node sees it.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of this node.")],
    cpus: Annotated[int, typer.Option(min=1, help="Processors that the job asked for.")],
    code: Annotated[str, typer.Option(help="Hash of the trainer's sources where the job was submitted.")],
    require_approved: Annotated[
        bool, typer.Option("--require-approved", help="Whether somebody must have approved the profile as it is now.")
    ] = False,
    profile_sha256: Annotated[
        str | None, typer.Option(help="Of the profile that was approved when the job was written, as runs name it.")
    ] = None,
    reports: Reports = REPORTS,
) -> None:
    """Compare this node with profile, code and dataset."""
    from autotune.cluster.preflight import describe, problems_of
    from autotune.machine.host import SystemHost
    from autotune.machine.measured_device import look_at_node
    from autotune.machine.nvml import NvmlMonitor
    from autotune.profiles import approval
    from autotune.profiles.store import read_profile

    if require_approved:
        approval.require_approved(profile, reports, expect_sha256=profile_sha256)
    stored = read_profile(profile).profile
    monitor = NvmlMonitor()
    try:
        node = look_at_node(_node_name(), data, SystemHost(), monitor)
    finally:
        monitor.close()
    problems = problems_of(stored, node, ranks=ranks, cpus=cpus, code_sha256=code)
    if problems:
        told = "; ".join(f"{one.field} is {one.found}, and should be {one.expected}" for one in problems)
        raise ProfileRejected(f"{node.name}: {told}", next_step=problems[0].next_step)
    if node.nvlinked is False:
        sys.stderr.write(f"warn: {node.name}: its GPUs are not all linked by NVLink: gradients go a slower way\n")
    print(f"preflight: {describe(node)}")


def meet(*, job: Annotated[int, typer.Option(min=0, help="The job's number.")], interface: Interface = None) -> None:
    """Print this node's rendezvous address and port."""
    from autotune.cluster.torchrun import choose_port, is_free, own_address, read_addresses, resolve_own_name

    here = own_address(interface, read_addresses(), resolve_own_name())
    port, taken = choose_port(job, lambda port: is_free(here, port))
    if taken:
        sys.stderr.write(
            f"meet: port {', '.join(map(str, taken))} of {_node_name()} is taken by somebody else; using {port}\n"
        )
    print(f"{here}:{port}")


def address(*, interface: Interface = None) -> None:
    """Print this node's address and network interface."""
    from autotune.cluster.torchrun import interface_of, own_address, read_addresses, resolve_own_name

    addresses = read_addresses()
    own = own_address(interface, addresses, resolve_own_name())
    print(f"{own} {interface_of(own, addresses)}")


def ended(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    *,
    said_before: Annotated[str, typer.Option(help="What exit.json held before this start.")] = "",
    job_code: Annotated[int, typer.Option(help="What srun returned.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Of the job.")] = 1,
    link: Annotated[int | None, typer.Option(help="Number of this job in its chain; asks whether to go on.")] = None,
) -> None:
    """Report how a run ended, and exit with its code."""
    from autotune.launch.run_end import PATIENCE_HERE_S, PATIENCE_S, has_work_left, run_end_of

    patience_s = PATIENCE_HERE_S if nodes == 1 else PATIENCE_S
    ending = run_end_of(run, said_before, job_code, patience_s=patience_s) if link is None else has_work_left(run, link)
    sys.stderr.write(f"launch: {ending.words}\n")
    raise typer.Exit(ending.code)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def outside(
    *,
    nodes: Annotated[int, typer.Option(min=1, help="So many of the job's.")],
    script: Annotated[str, typer.Option(help="What bash is to run on each.")],
) -> None:
    """Run a script on nodes from outside the container."""
    from autotune.cluster.torchrun import STARTER_VARIABLE, start_outside

    if not os.environ.get(STARTER_VARIABLE):
        raise UsageError("no script of a job starts anything here", next_step="This is called inside of jobs only.")
    raise SystemExit(start_outside(Path(os.environ[STARTER_VARIABLE]), nodes, script))


app = typer.Typer(no_args_is_help=True, help="Commands that the scripts of jobs call.")
for _command in (preflight, meet, address, outside, ended):
    app.command()(_command)
