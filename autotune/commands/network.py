"""``autotune network``: how ranks reach each other, what that costs a step, and the fastest exchange of gradients."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, refuse_login_node, submitted
from autotune.commands.options import REPORTS, AsJson, Here, ProfileData, Reports, TrialTimeout
from autotune.core.defaults import TRIAL_TIMEOUT_S

_LINKS_MINUTES = 3.0


def network(
    context: typer.Context,
    *,
    profile: Annotated[
        Path, typer.Option(help="A profile that autotune probe wrote on such machines.", autocompletion=profiles)
    ],
    data: ProfileData = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of this SLURM job to use. Default: all; with --slurm 2.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on each. Default: as the profile was probed.")] = None,
    links_only: Annotated[bool, typer.Option("--links-only", help="Measure messages, and no training step.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all measurements.")] = 15.0,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Measure links and steps of ranks together, and write the fastest exchange at the same global batch."""
    from autotune.search.profiles import probed_here, read_profile, report_directory
    from autotune.search.workers import SweepRequest
    from autotune.show.answers import answer_json
    from autotune.show.network import network_text
    from autotune.tuning.network import nodes_here, tune_network

    stored = read_profile(profile)
    probe = probed_here(stored)
    train = stored.profile.train
    job = JobRequest(
        name=f"network-{train.model.name}",
        purpose=f"Measures the network between nodes, and how {train.model.name} trains best over it.",
        ledger=str(report_directory(stored.path, reports) / "ledger"),
        expected_minutes=1 + (_LINKS_MINUTES if links_only else minutes),
        trial_timeout_s=trial_timeout,
        nodes=nodes or 2,
        ranks=ranks or probe.local_ranks,
        on_gpus=train.device == "cuda",
        cpus=stored.profile.fingerprint.allotted_cpus,
        with_srun=False,
        reports=reports,
    )
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    request = SweepRequest(
        data=stored.data_dir(data), reports=reports, minutes=minutes, ranks=ranks, trial_timeout_s=trial_timeout
    )
    found, _ = tune_network(stored, request, nodes or nodes_here(), links_only=links_only)
    print(answer_json(found) if as_json else network_text(found, profile))
