"""``autotune baseline``: the speedup of tuning, measured in windows of training.

Some windows are trained as tuned and with both baselines, and the speedup is written
into the profile.
"""

import sys
from typing import Annotated

import typer

from autotune.base.defaults import BASELINE_ROUNDS, WINDOW_S
from autotune.console.options import SweepOptions, Window, grouped, option, time_limit
from autotune.console.slurm_job import JobOptions


@grouped
def baseline(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    window_s: Window = WINDOW_S,
    rounds: Annotated[
        int,
        option(
            "N",
            "Maximum rounds of windows; fewer once ratios are known within 5 %.",
            min=1,
            max=100,
        ),
    ] = BASELINE_ROUNDS,
    time_limit_s: Annotated[float, time_limit("5min")] = 300.0,
    job: JobOptions,
) -> None:
    """Measure the speedup over untuned settings.

    Compares the tuned settings with defaults and the paper baseline in interleaved
    windows; three rounds at least.
    """
    from autotune.base.answer_json import answer_json
    from autotune.baseline.sections import baseline_text
    from autotune.baseline.stage import compare_recipes
    from autotune.profiles.local_probe import require_local_probe
    from autotune.profiles.measuring_commands import profile_job, sweep_request
    from autotune.profiles.store import read_trainer_profile
    from autotune.trials.decide.least_time import sweep_time_text
    from autotune.trials.session import open_session

    stored = read_trainer_profile(sweep.profile, "baseline")
    require_local_probe(stored)
    train = stored.profile.train
    request = sweep_request(sweep, stored, job.reports, time_limit_s, window_s=window_s)
    purpose = (
        f"Measures the speedup of the tuned {train.model.name}, and writes it into"
        f" {stored.path}."
    )
    if job.submitted_or_rejected(
        context, profile_job("baseline", purpose, stored, request)
    ):
        return
    sys.stderr.write(sweep_time_text("baseline", train.device, window_s, time_limit_s))
    with open_session(train.device, request.data) as bench:
        comparison = compare_recipes(bench, stored, request, rounds=rounds)
    if job.as_json:
        print(answer_json(comparison))
    else:
        print(baseline_text(comparison, sweep.profile))
