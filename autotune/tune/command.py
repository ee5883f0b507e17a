"""``autotune tune``: from a model and a dataset to a tuned profile and a report, in one resumable command."""

import json
import os
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import WINDOW_S
from autotune.console.options import ModelOptions, Reports, Window, grouped
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.tune.pipeline import TuneRequest
    from autotune.tune.values import TuningResult

Skippable = StrEnum("Skippable", ["ESTIMATE", "PROBE", "ACCUMULATION", "WORKERS", "NETWORK", "BASELINE", "REPORT"])


@grouped
def tune(
    context: typer.Context,
    *,
    options: ModelOptions,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Nodes that the training is to have. With --slurm a second job measures two of them."),
    ] = 1,
    explore: Annotated[
        bool,
        typer.Option(
            "--explore", help="Also search precision, attention, checkpointing, compiling, layout and micro-batch."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="For everything, kept within 20 %. Default: 15 for each model, 30 with --explore."),
    ] = None,
    skip: Annotated[
        list[Skippable] | None,
        typer.Option(
            help="A stage to leave out; repeat for several. Without probe the profile must be there; without "
            "accumulation steps are probed with one micro-batch."
        ),
    ] = None,
    window_s: Window = WINDOW_S,
    out: Annotated[Path, typer.Option(help="Directory of the profiles.")] = Path("profiles"),
    job: JobOptions,
) -> None:
    """Make tuned profiles and a report; rerun to resume."""
    from autotune.tune.pipeline import ORDER, TuneRequest, Tuning

    number = os.environ.get("SLURM_JOB_ID")
    skipped = {one.value for one in skip or ()}
    left_out = frozenset(stage for stage in ORDER if stage in skipped or (stage == "explore" and not explore))
    models = options.model
    request = TuneRequest(
        probes=options.probes(
            job.reports, {}, accumulate="accumulation" not in skipped, traced="estimate" not in skipped
        ),
        out=out,
        device=options.device,
        minutes=minutes or 15.0 * (1 + explore) * len(models),
        skip=left_out,
        nodes=nodes,
        window_s=window_s,
    )
    asked = JobRequest(
        name="tune",
        purpose=f"Tunes {', '.join(models)}: micro-batch, loader workers, exchange of gradients; writes profiles.",
        trial_log=str(job.reports / "*" / "trials"),
        expected_minutes=1 + 1.2 * request.minutes,  # which the last stage may take longer
        trial_timeout_s=options.trial_timeout,
        ranks=options.ranks,
        on_gpus=options.device != "cpu",
        reports=job.reports,
        then=(lambda first: _second(asked, first, request)) if nodes > 1 and "network" not in skipped else None,
    )
    if job.submitted_or_rejected(context, asked):
        return
    tuning = Tuning(request=request)
    try:
        result = tuning.run()
    except AutotuneError:
        if tuning.has_saved:
            again = shlex.join(["autotune", *context.find_root().obj, *(["--slurm"] if number else [])])
            sys.stderr.write(f"tune: what was finished is saved; to go on from here: {again}\n")
        raise
    if number is not None:
        from autotune.base.files import write_atomically

        with_baseline = any(stage.name == "baseline" and stage.status == "done" for stage in result.stages)
        found = {"profiles": result.profiles, "report": result.report, "with_baseline": with_baseline}
        write_atomically(_found_by(number, job.reports), json.dumps(found, indent=1) + "\n")
    _say(result, as_json=job.as_json)
    if tuning.failed:
        raise tuning.failed[0]


def _say(result: "TuningResult", *, as_json: bool) -> None:
    from autotune.base.document import answer_json
    from autotune.profiles.store import read_profile
    from autotune.tune.sections import tuning_text

    profiles = [read_profile(Path(path)).profile for path in result.profiles]
    print(answer_json(result) if as_json else tuning_text(result, profiles))


def tune_between_nodes(
    *,
    tuned: Annotated[Path, typer.Argument(help="What a tuning in a job found.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.")],
    minutes: Annotated[float, typer.Option(help="For the network of each profile.")],
    trial_timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.")],
    reports: Reports,
) -> None:
    """Measure the network between this job's nodes."""
    from autotune.tune.pipeline import measure_between_nodes
    from autotune.workers.values import SweepRequest

    request = SweepRequest(data=data, reports=reports, minutes=minutes, trial_timeout_s=trial_timeout)
    _say(measure_between_nodes(tuned, request), as_json=False)


def _second(first: JobRequest, number: str, request: "TuneRequest") -> JobRequest:
    """Return the job that measures between nodes, after the one that tunes."""
    from autotune.tune.values import BUDGET_WEIGHTS

    models = len(request.probes)
    of_all = sum(weight for name, weight in BUDGET_WEIGHTS.items() if name not in request.skip)
    minutes = max(1.0, request.minutes / models * BUDGET_WEIGHTS["network"] / of_all)
    command = [
        "tune-between-nodes", str(_found_by(number, first.reports)), "--data", str(request.probes[0].data),
        "--minutes", f"{minutes:.1f}", "--trial-timeout", f"{first.trial_timeout_s:g}", "--reports", str(first.reports),
    ]  # fmt: skip
    return replace(
        first,
        name="tune-between-nodes",
        purpose=f"Measures the network between two nodes for what job {number} tuned.",
        expected_minutes=1 + 2 * minutes * models,
        nodes=2,
        with_srun=False,
        command=command,
        then=None,
    )


def _found_by(number: str, reports: Path) -> Path:
    return reports / "jobs" / f"tune-{number}.json"
