"""``autotune baseline``: what the tuned settings are worth, against the defaults and the paper's style."""

from typing import Annotated

import typer

from autotune.commands.jobs import DryRun, Slurm, Wait, goes_elsewhere, job_of_profile
from autotune.commands.options import (
    REPORTS,
    AsJson,
    Here,
    ProbedProfile,
    ProbedRanks,
    ProfileData,
    Reports,
    TrialTimeout,
    Window,
)
from autotune.core.defaults import BASELINE_ROUNDS, TRIAL_TIMEOUT_S, WINDOW_S


def baseline(
    context: typer.Context,
    *,
    profile: ProbedProfile,
    data: ProfileData = None,
    ranks: ProbedRanks = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Windows of each at most; fewer where ratios are known to 5 %.")
    ] = BASELINE_ROUNDS,
    window_s: Window = WINDOW_S,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time after which no round begins any more; three are always measured.")
    ] = 5.0,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Train for some windows as tuned, by default and in the paper's style, and write what that is worth."""
    from autotune.search.profiles import probed_here, read_profile
    from autotune.search.workers import SweepRequest
    from autotune.show.answers import answer_json
    from autotune.show.baseline import baseline_text
    from autotune.tuning.bench import open_bench
    from autotune.tuning.sweeps import compare_recipes

    stored = read_profile(profile)
    probed_here(stored)
    train = stored.profile.train
    request = SweepRequest(
        data=stored.data_dir(data),
        reports=reports,
        minutes=minutes,
        ranks=ranks,
        window_s=window_s,
        trial_timeout_s=trial_timeout,
    )
    purpose = f"Measures what the tuned settings of {train.model.name} are worth, and writes it into {stored.path}."
    job = job_of_profile("baseline", purpose, stored, request)
    if goes_elsewhere(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json, here=here):
        return
    with open_bench(train.device, request.data) as bench:
        found = compare_recipes(bench, stored, request, rounds=rounds)
    print(answer_json(found) if as_json else baseline_text(found, profile))
