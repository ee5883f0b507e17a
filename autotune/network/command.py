"""``autotune network``: how ranks reach each other, what that costs a step, and the fastest exchange of gradients."""

from dataclasses import replace
from typing import Annotated

import typer

from autotune.console.options import SweepOptions, grouped
from autotune.console.slurm_job import JobOptions, job_of_profile


@grouped
def network(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of this SLURM job to use. Default: all; with --slurm 2.")
    ] = None,
    links_only: Annotated[bool, typer.Option("--links-only", help="Measure messages, and no training step.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all measurements.")] = 15.0,
    job: JobOptions,
) -> None:
    """Measure links and steps of ranks together, and write the fastest exchange at the same global batch."""
    from autotune.base.document import answer_json
    from autotune.network.sections import network_text
    from autotune.network.stage import nodes_here, tune_network
    from autotune.profiles.store import read_profile, require_local_probe

    stored = read_profile(sweep.profile)
    require_local_probe(stored)
    request = sweep.request(stored, job.reports, minutes)
    purpose = f"Measures the network between nodes, and how {stored.profile.train.model.name} trains best over it."
    asked = job_of_profile("network", purpose, stored, request)
    expected_minutes = 4 if links_only else asked.expected_minutes
    if job.goes_elsewhere(
        context, replace(asked, nodes=nodes or 2, expected_minutes=expected_minutes, with_srun=False)
    ):
        return
    found, _ = tune_network(stored, request, nodes or nodes_here(), links_only=links_only)
    print(answer_json(found) if job.as_json else network_text(found, sweep.profile))
