"""``autotune scale``: how many nodes are useful at the user's global batch, predicted, and measured where they are."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from autotune.base.defaults import TRIAL_TIMEOUT_S
from autotune.console.options import REPORTS, NodeRanks, ProfileData, Reports, TrialTimeout, grouped, parsed, profiles
from autotune.console.slurm_job import JobRequest, SlurmOptions
from autotune.errors import UsageError

DEFAULT_NODES = "1,2,4,8,16,32,64,128"


@grouped
def scale(
    context: typer.Context,
    *,
    profile: Annotated[
        list[Path], typer.Option(help="A probed profile; several are shown together.", autocompletion=profiles)
    ],
    nodes: Annotated[
        str | None, typer.Option(help=f"Numbers of nodes, with commas between. Default: {DEFAULT_NODES}.")
    ] = None,
    data: ProfileData = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Assume this line rate of a node's card, such as 25Gbit, instead of measured.")
    ] = None,
    latency: Annotated[str, typer.Option(help="With --bandwidth: of a hop between nodes.")] = "25us",
    ranks: NodeRanks = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Real tokens of a step over all ranks. Default: the profile's.")
    ] = None,
    sixteen_bit: Annotated[
        bool, typer.Option("--16-bit-gradients", help="As if a check had found the loss with 16-bit gradients equal.")
    ] = False,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    reports: Reports = REPORTS,
    job: SlurmOptions,
) -> None:
    """Predict tokens/s from one node to many under the same global batch, and measure what this job's nodes can."""
    from autotune.base.document import answer_json
    from autotune.base.units import parse_bits_per_s, parse_seconds
    from autotune.network.scaling import Assumed, known_of, ranks_of
    from autotune.network.sections import scaling_text
    from autotune.network.stage import scale_profile
    from autotune.profiles.store import read_profile

    if nodes is None and job.slurm is not None:
        raise UsageError(
            "--slurm asks for as many nodes as the largest number, and none was given",
            next_step="Say on which numbers of nodes to measure: --nodes 1,2,4",
        )
    parts = [part.strip() for part in (nodes or DEFAULT_NODES).split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--nodes {nodes}: not numbers of nodes", next_step="Write them with commas: --nodes 1,2,4")
    counts = sorted({int(part) for part in parts})
    every = [read_profile(path) for path in profile]
    first = every[0].profile
    asked = JobRequest(
        name="scale",
        purpose=f"Measures {', '.join(one.profile.train.model.name for one in every)} on up to {max(counts)} nodes.",
        ledger=", ".join(str(reports / one.path.stem / "ledger") for one in every),
        expected_minutes=1 + 1.5 * len(counts) * len(every),
        trial_timeout_s=trial_timeout,
        nodes=max(counts),
        ranks=ranks or ranks_of(first),
        on_gpus=first.train.device == "cuda",
        cpus=first.fingerprint.allotted_cpus,
        with_srun=False,
        reports=reports,
    )
    if job.submitted(context, asked):
        return
    assumed = None
    if bandwidth is not None:
        assumed = Assumed(
            bits_per_s=parsed(parse_bits_per_s, bandwidth, "--bandwidth"),
            latency_s=parsed(parse_seconds, latency, "--latency"),
        )
    know = functools.partial(
        known_of,
        assumed=assumed,
        ranks_per_node=ranks,
        global_batch_tokens=global_batch_tokens,
        sixteen_bit=sixteen_bit,
    )
    found = [
        scale_profile(one, know(one.profile), counts, data=data, reports=reports, trial_timeout_s=trial_timeout)
        for one in every
    ]
    print(answer_json(found) if job.as_json else scaling_text(found))
