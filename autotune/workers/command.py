"""``autotune workers``: the smallest number of DataLoader workers that does not cost throughput."""

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import WINDOW_S
from autotune.console.options import SweepOptions, Window, duration, grouped, option, time_limit
from autotune.console.slurm_job import JobOptions, profile_job

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
        int | None, option("N", "Maximum DataLoader workers per GPU. Default: its share of the CPUs.", min=0, max=4096)
    ] = None,
    time_limit_s: Annotated[float, time_limit("10min")] = 600.0,
    step_time_s: Annotated[
        float | None,
        duration("--step-time", "120ms", "Replay a GPU step of this duration instead; needs no GPU.", least_s=1e-4),
    ] = None,
    job: JobOptions,
) -> None:
    """Find the fewest DataLoader workers that suffice.

    Measures at the probed micro-batch size, and writes num_workers into the profile. The time limit may leave several
    numbers undecided.
    """
    from autotune.base.document import answer_json
    from autotune.profiles.store import read_profile, require_local_probe
    from autotune.trials.session import open_session
    from autotune.workers.sections import workers_text
    from autotune.workers.stage import count_workers

    stored = read_profile(sweep.profile)
    probe = require_local_probe(stored)
    train = stored.profile.train
    request = sweep.request(
        stored, job.reports, time_limit_s, window_s=window_s, max_workers=max_workers, replayed_step_s=step_time_s
    )
    purpose = f"Finds the DataLoader workers that {train.model.name} needs, and writes them into {stored.path}."
    asked = profile_job("workers", purpose, stored, request, on_gpus=step_time_s is None)
    if job.submitted_or_rejected(context, asked):
        return
    device = "cpu" if step_time_s else train.device
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
        f"measured: {command('workers', stored.path, step_time=told)}"
    )
