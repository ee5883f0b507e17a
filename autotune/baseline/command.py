"""``autotune baseline``: train some windows as tuned and with both baselines; write the speedup into the profile."""

from typing import Annotated

import typer

from autotune.base.defaults import BASELINE_ROUNDS, WINDOW_S
from autotune.console.options import SweepOptions, Window, grouped
from autotune.console.slurm_job import JobOptions, profile_job


@grouped
def baseline(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    window_s: Window = WINDOW_S,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Windows of each at most; fewer where ratios are known to 5 %.")
    ] = BASELINE_ROUNDS,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time after which no round begins any more; three are always measured.")
    ] = 5.0,
    job: JobOptions,
) -> None:
    """Measure speedup over defaults and paper recipe."""
    from autotune.base.document import answer_json
    from autotune.baseline.sections import baseline_text
    from autotune.baseline.stage import compare_recipes
    from autotune.profiles.store import read_profile, require_local_probe
    from autotune.trials.session import open_session

    stored = read_profile(sweep.profile)
    require_local_probe(stored)
    train = stored.profile.train
    request = sweep.request(stored, job.reports, minutes, window_s=window_s)
    purpose = f"Measures what the tuned settings of {train.model.name} are worth, and writes it into {stored.path}."
    if job.submitted_or_rejected(context, profile_job("baseline", purpose, stored, request)):
        return
    with open_session(train.device, request.data) as bench:
        found = compare_recipes(bench, stored, request, rounds=rounds)
    print(answer_json(found) if job.as_json else baseline_text(found, sweep.profile))
