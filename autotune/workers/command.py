"""``autotune workers``: the smallest number of DataLoader workers that does not cost throughput."""

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import WINDOW_S
from autotune.console.options import SweepOptions, Window, grouped, parsed
from autotune.console.slurm_job import JobOptions, profile_job
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.memory.values import ProbeEvidence
    from autotune.profiles.store import StoredProfile


@grouped
def workers(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    window_s: Window = WINDOW_S,
    max_workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=4096, help="Try no more on each rank. Default: the CPUs allotted to this process, shared out."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for all windows; what is not decided by then is said to be undecided.")
    ] = 10.0,
    step_time: Annotated[
        str | None,
        typer.Option(help="Replay a GPU's step of this time, such as 120ms, instead of training; needs no GPU here."),
    ] = None,
    job: JobOptions,
) -> None:
    """Find the fewest DataLoader workers that suffice.

    Measures at the probed micro-batch size, and writes the number into the profile.
    """
    from autotune.base.document import answer_json
    from autotune.base.units import parse_seconds
    from autotune.profiles.store import read_profile, require_local_probe
    from autotune.trials.session import open_session
    from autotune.workers.sections import workers_text
    from autotune.workers.stage import count_workers

    replayed_step_s = None if step_time is None else parsed(parse_seconds, step_time, "--step-time")
    if replayed_step_s is not None and replayed_step_s < 1e-4:
        raise UsageError(
            f"--step-time {step_time!r} is below 0.1 ms", next_step="Give a longer time: --step-time 120ms"
        )
    stored = read_profile(sweep.profile)
    probe = require_local_probe(stored)
    train = stored.profile.train
    request = sweep.request(
        stored, job.reports, minutes, window_s=window_s, max_workers=max_workers, replayed_step_s=replayed_step_s
    )
    purpose = f"Counts the loader workers that {train.model.name} needs, and writes them into {stored.path}."
    if job.submitted_or_rejected(context, profile_job("workers", purpose, stored, request, on_gpus=step_time is None)):
        return
    device = "cpu" if step_time else train.device
    with open_session(device, request.data, without_gpu=_replay(stored, probe)) as bench:
        found = count_workers(bench, stored, request)
    print(answer_json(found) if job.as_json else workers_text(found, sweep.profile, request.data))


def _replay(stored: "StoredProfile", probe: "ProbeEvidence") -> str:
    """Return the next step for a machine without the profile's GPU."""
    from autotune.profiles.decide.follow_up import command

    rows = stored.profile.train.micro_batch_size
    step_s = next((point.step_s for point in probe.curve if point.micro_batch_size == rows), None)
    told = "T" if step_s is None else f"{1e3 * step_s:.4g}ms"
    return (
        "Run it where the profile was probed; or, on a node with the same CPU and disk, replay the step that the probe "
        f"measured: {command('workers', profile=stored.path, step_time=told)}"
    )
