"""``autotune network``: the fastest gradient synchronisation.

It measures links between ranks, and their cost in a step.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.wording import plural
from autotune.console.options import (
    Bandwidth,
    SweepOptions,
    batch_tokens,
    duration,
    flag,
    grouped,
    option,
    time_limit,
)
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.network.decide.scaling_model import ScalingModel
    from autotune.network.scaling import Assumed
    from autotune.profiles.store import StoredProfile
    from autotune.trials.sweep_request import SweepRequest

DEFAULT_NODES = "1,2,4,8,16,32,64,128"


@grouped
def network(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    nodes: Annotated[
        str | None,
        option(
            "N[,N]...",
            f"Node count. Default: this job's; 2 with --slurm; {DEFAULT_NODES} with"
            " --predict.",
        ),
    ] = None,
    time_limit_s: Annotated[float, time_limit("15min")] = 900.0,
    predict: Annotated[
        bool,
        flag(
            "--predict",
            "Predict tokens/s per node count, and measure the counts that this job"
            " has.",
        ),
    ] = False,
    bandwidth: Bandwidth = None,
    latency_s: Annotated[
        float,
        duration(
            "--latency",
            "25us",
            "Latency assumed with --bandwidth.",
            25e-6,
            advanced=True,
        ),
    ] = 25e-6,
    global_batch_tokens: Annotated[int | None, batch_tokens("the profile's")] = None,
    job: JobOptions,
) -> None:
    """Find the fastest gradient synchronisation.

    Measures links and steps, and writes the fastest into the profile. Code of yours is
    timed on one rank and on all (--ranks), which shows what synchronisation costs.
    --predict predicts scaling at the same global batch; --bandwidth and
    --global-batch-tokens require it.
    """
    from autotune.network.scaling import Assumed, known_of
    from autotune.profiles.measuring_commands import sweep_request
    from autotune.profiles.store import read_profile

    counts = _counts(nodes, several=predict)
    for name, is_set in {
        "--bandwidth": bandwidth,
        "--global-batch-tokens": global_batch_tokens,
    }.items():
        if is_set is not None and not predict:
            raise UsageError(
                f"{name} requires --predict",
                next_step=f"Add --predict, or remove {name}",
            )
    stored = read_profile(sweep.profile)
    assumed = None
    if bandwidth is not None:
        assumed = Assumed(bits_per_s=bandwidth, latency_s=latency_s)
    if not predict:
        request = sweep_request(sweep, stored, job.reports, time_limit_s)
        _measure(context, stored, request, counts, job)
    elif stored.profile.has_train:
        known = partial(
            known_of,
            stored.profile,
            assumed=assumed,
            ranks_per_node=sweep.ranks,
            global_batch_tokens=global_batch_tokens,
        )
        _predict(context, sweep, stored, counts, known=known, job=job)
    else:
        _predict_own(sweep, stored, counts, assumed, job)


def _measure(
    context: typer.Context,
    stored: "StoredProfile",
    request: "SweepRequest",
    counts: list[int],
    job: JobOptions,
) -> None:
    """Measure links and steps on several ranks, or submit a job for it."""
    from autotune.base.answer_json import answer_json
    from autotune.network.sections import network_text
    from autotune.network.stage import measure_network, require_one_node
    from autotune.profiles.local_probe import require_local_probe
    from autotune.profiles.measuring_commands import profile_job
    from autotune.trials.decide.least_time import sweep_time_text

    profile = stored.profile
    nodes = counts[0] if counts else None
    # Steps of your code are measured on the ranks of one node, at any known size.
    usual_nodes = 1
    if profile.has_train:
        require_local_probe(stored)
        usual_nodes = 2
    else:
        require_one_node(stored, nodes)
    purpose = (
        f"Measures the network, and what it costs a step of {profile.subject.words}."
    )
    job_request = profile_job("network", purpose, stored, request)
    job_request = replace(
        job_request, nodes=nodes or usual_nodes, with_srun=not profile.has_train
    )
    if job.submitted_or_rejected(context, job_request):
        return
    sys.stderr.write(
        sweep_time_text("network", profile.device, request.window_s, request.budget_s)
    )
    measured, _ = measure_network(stored, request, nodes)
    print(answer_json(measured) if job.as_json else network_text(measured, stored.path))


def _predict(
    context: typer.Context,
    sweep: SweepOptions,
    stored: "StoredProfile",
    counts: list[int],
    *,
    known: "Callable[[], ScalingModel]",
    job: JobOptions,
) -> None:
    """Print the predicted scaling, and measure the numbers of nodes of this job.

    Args:
        context: Command line, which a job runs again.
        sweep: Options of the command.
        stored: Profile of the bundled trainer.
        counts: Numbers of nodes; empty for the default ones.
        known: Returns the scaling model of the profile.
        job: Options of the SLURM job and of the output.

    Raises:
        UsageError: If a job is requested without a number of nodes.
    """
    from autotune.base.answer_json import answer_json
    from autotune.network.scaling import ranks_of
    from autotune.network.sections import scaling_text
    from autotune.subjects.mlm.network.stage import scale_profile
    from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY, report_directory

    profile, model = stored.profile, stored.profile.train.model.name
    if not counts and job.slurm is not None:
        what = (
            "--slurm with --predict requires --nodes: the job gets as many nodes as"
            " the largest number"
        )
        raise UsageError(what, next_step="Add --nodes 1,2,4")
    counts = counts or _counts(DEFAULT_NODES, several=True)
    job_request = JobRequest(
        name=f"network-predict-{model}",
        purpose=f"Measures {model} on up to {plural(max(counts), 'node')}.",
        trial_log=str(
            report_directory(sweep.profile, job.reports) / TRIAL_LOG_DIRECTORY
        ),
        expected_minutes=1 + 1.5 * len(counts),
        trial_timeout_s=sweep.trial_timeout_s,
        nodes=max(counts),
        ranks=sweep.ranks or ranks_of(profile),
        on_gpus=profile.train.device == "cuda",
        cpus=profile.fingerprint.allotted_cpus,
        with_srun=False,
        reports=job.reports,
    )
    if job.submitted(context, job_request):
        return
    scaled = scale_profile(
        stored,
        known(),
        counts,
        data=sweep.data,
        reports=job.reports,
        trial_timeout_s=sweep.trial_timeout_s,
    )
    print(answer_json(scaled) if job.as_json else scaling_text(scaled))


def _predict_own(
    sweep: SweepOptions,
    stored: "StoredProfile",
    counts: list[int],
    assumed: "Assumed | None",
    job: JobOptions,
) -> None:
    """Print the predicted step of your code on more nodes."""
    from autotune.base.answer_json import answer_json
    from autotune.network.own_step import predict_own
    from autotune.network.sections import own_scaling_text

    counts = counts or _counts(DEFAULT_NODES, several=True)
    scaled = predict_own(
        stored,
        counts,
        None if assumed is None else assumed.link,
        sweep.ranks,
        "measured" if assumed is None else assumed.words,
    )
    print(answer_json(scaled) if job.as_json else own_scaling_text(scaled))


def _counts(nodes: str | None, *, several: bool) -> list[int]:
    parts = [] if nodes is None else [part.strip() for part in nodes.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--nodes {nodes!r} is not a list of node counts",
            next_step="Write --nodes 1,2,4",
        )
    if len(parts) > 1 and not several:
        raise UsageError(
            f"--nodes {nodes!r} requires --predict",
            next_step="Add --predict, or write --nodes 2",
        )
    return sorted({int(part) for part in parts})
