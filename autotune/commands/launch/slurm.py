"""``autotune launch slurm``: a training run as a SLURM job, from a profile."""

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.completion import sites
from autotune.commands.launch.training import (
    DataOption,
    ProfileOption,
    RequireApproved,
    RunOption,
    SetOption,
    installed_torch,
    train_request,
)
from autotune.commands.options import REPORTS, AsJson, Reports

if TYPE_CHECKING:
    from autotune.cluster.batch import TrainJob


def slurm(
    *,
    profile: ProfileOption,
    data: DataOption = None,
    out: RunOption = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. Default: one for each GPU of the profile.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="[D-]HH:MM:SS", help="Longest time of the job. Default: the site's.")
    ] = None,
    site: Annotated[
        str,
        typer.Option(
            "--site",
            help="The cluster's site file. Default: AUTOTUNE_SITE, else ./site.toml if any.",
            autocompletion=sites,
        ),
    ] = "",
    chain: Annotated[
        int,
        typer.Option(min=1, max=100, help="Submit so many jobs, each going on after the other: where requeue is off."),
    ] = 1,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and do nothing.")] = False,
    assignments: SetOption = None,
    require_approved: RequireApproved = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Write the script of a training job: it goes on after time limits and pre-emption until the run is done."""
    from autotune.cluster.batch import read_template, train_script
    from autotune.cluster.site import TIME_PATTERN, SiteFile, find_site, read_site
    from autotune.cluster.training import training_job
    from autotune.errors import UsageError
    from autotune.store import write_atomically

    if submit and dry_run:
        raise UsageError("--dry-run submits nothing", next_step="Leave out one of --submit and --dry-run.")
    if time is not None and re.fullmatch(TIME_PATTERN, time) is None:
        raise UsageError(
            f"--time {time} is not a time limit", next_step="Write [D-]HH:MM:SS, such as 04:00:00 or 1-00:00:00."
        )
    site_path = find_site(site, os.environ)
    cluster = SiteFile() if site_path is None else read_site(site_path)
    elsewhere = bool(cluster.python or cluster.command_prefix)
    request = train_request(
        profile,
        data,
        out,
        assignments,
        python=cluster.python or sys.executable,
        nodes=nodes,
        ranks=ranks,
        chain=chain,
        time=time,
        torch_of_profile=elsewhere or installed_torch() is None,
        reviews=reports if require_approved or cluster.require_approved else None,
    )
    job = training_job(request, cluster)
    script = train_script(job, cluster, read_template("train", cluster, site_path))
    if dry_run:
        print(script, end="")
        return
    write_atomically(job.script, script)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    _tell(job, _submit(job) if submit else [], as_json=as_json)


def _submit(job: "TrainJob") -> list[str]:
    from autotune.cluster.submit import submit

    return [submit(job.script, [str(link)] if job.chain > 1 else []) for link in range(1, job.chain + 1)]


def _tell(job: "TrainJob", ids: list[str], *, as_json: bool) -> None:
    from autotune.show.answers import answer_json

    by_hand = f"sbatch {shlex.quote(str(job.script))}"
    if job.chain > 1:
        by_hand = f"for link in $(seq {job.chain}); do {by_hand} $link; done"
    log = str(job.log).replace("%j", ids[0] if ids else "<job>")
    told = {"run": str(job.run), "script": str(job.script), "log": log}
    if as_json:
        print(answer_json({"jobs": ids, **told}))
        return
    for name, value in {"job": ", ".join(ids) or "not submitted", **told}.items():
        print(f"{name:<7}{value}")
    print(f"next: autotune launch status {shlex.quote(str(job.run))}" if ids else f"next: {by_hand}")
