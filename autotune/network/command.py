"""``autotune network``: links between ranks, their cost in a step, and the fastest gradient synchronisation."""

from dataclasses import replace
from typing import Annotated

import typer

from autotune.console.options import SweepOptions, grouped, parsed
from autotune.console.slurm_job import JobOptions, JobRequest, profile_job
from autotune.errors import UsageError

DEFAULT_NODES = "1,2,4,8,16,32,64,128"


@grouped
def network(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]...",
            help="Nodes of this SLURM job to use. Default: all; with --slurm 2. With --predict several numbers; "
            f"default: {DEFAULT_NODES}.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all measurements.")] = 15.0,
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Predict tokens/s on each number of nodes; measure it on those of this job."),
    ] = False,
    bandwidth: Annotated[
        str | None, typer.Option(help="With --predict: a node's line rate, such as 25Gbit, instead of the measured.")
    ] = None,
    latency: Annotated[str, typer.Option(help="With --bandwidth: of a hop between nodes.")] = "25us",
    global_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --predict: non-padding tokens of a step, all ranks. Default: the profile's."),
    ] = None,
    job: JobOptions,
) -> None:
    """Find the fastest gradient synchronisation.

    Measures links and steps, writes the fastest. With --predict: tokens/s on one node to many, same global batch.
    """
    from autotune.base.document import answer_json
    from autotune.base.units import parse_bits_per_s, parse_seconds
    from autotune.network.scaling import Assumed, known_of, ranks_of
    from autotune.network.sections import network_text, scaling_text
    from autotune.network.stage import nodes_here, scale_profile, tune_network
    from autotune.profiles.store import read_profile, require_local_probe
    from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY, report_directory

    counts = _counts(nodes, several=predict)
    for option, is_set in {"--bandwidth": bandwidth, "--global-batch-tokens": global_batch_tokens}.items():
        if is_set is not None and not predict:
            raise UsageError(f"{option} requires --predict", next_step=f"Add --predict, or leave out {option}.")
    stored = read_profile(sweep.profile)
    profile, model = stored.profile, stored.profile.train.model.name
    if predict:
        if not counts and job.slurm is not None:
            raise UsageError(
                "--slurm asks for as many nodes as the largest number, and none was given",
                next_step="Say on which numbers of nodes to measure: --nodes 1,2,4",
            )
        counts = counts or _counts(DEFAULT_NODES, several=True)
        asked = JobRequest(
            name=f"network-predict-{model}",
            purpose=f"Measures {model} on up to {max(counts)} nodes.",
            trial_log=str(report_directory(sweep.profile, job.reports) / TRIAL_LOG_DIRECTORY),
            expected_minutes=1 + 1.5 * len(counts),
            trial_timeout_s=sweep.trial_timeout,
            nodes=max(counts),
            ranks=sweep.ranks or ranks_of(profile),
            on_gpus=profile.train.device == "cuda",
            cpus=profile.fingerprint.allotted_cpus,
            with_srun=False,
            reports=job.reports,
        )
        if job.submitted(context, asked):
            return
        rate = bandwidth and parsed(parse_bits_per_s, bandwidth, "--bandwidth")
        assumed = rate and Assumed(bits_per_s=rate, latency_s=parsed(parse_seconds, latency, "--latency"))
        known = known_of(
            profile,
            assumed=assumed or None,
            ranks_per_node=sweep.ranks,
            global_batch_tokens=global_batch_tokens,
        )
        scaled = scale_profile(
            stored, known, counts, data=sweep.data, reports=job.reports, trial_timeout_s=sweep.trial_timeout
        )
        print(answer_json(scaled) if job.as_json else scaling_text(scaled))
        return
    require_local_probe(stored)
    request = sweep.request(stored, job.reports, minutes)
    count = counts[0] if counts else None
    purpose = f"Measures the network between nodes, and how {model} trains best over it."
    asked = profile_job("network", purpose, stored, request)
    if job.submitted_or_rejected(context, replace(asked, nodes=count or 2, with_srun=False)):
        return
    measured, _ = tune_network(stored, request, count or nodes_here())
    print(answer_json(measured) if job.as_json else network_text(measured, sweep.profile))


def _counts(nodes: str | None, *, several: bool) -> list[int]:
    parts = [] if nodes is None else [part.strip() for part in nodes.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--nodes {nodes}: not numbers of nodes", next_step="Write them with commas: --nodes 1,2,4")
    if len(parts) > 1 and not several:
        raise UsageError(f"--nodes {nodes}: several numbers require --predict", next_step="Name one: --nodes 2")
    return sorted({int(part) for part in parts})
