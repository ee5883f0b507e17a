"""``autotune baseline``: the speedup of tuning, measured in windows of training.

Some windows are trained with the tuned settings and with untuned ones, in turn, and the
speedup is written into the profile; or the profile is compared with others.
"""

import sys
from pathlib import Path
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
    against: Annotated[
        list[Path] | None,
        option(
            "OTHER.toml", "Compare with another profile, of any trainer; repeatable."
        ),
    ] = None,
    untuned: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "Your setting before tuning. Default: that of your function; repeatable.",
        ),
    ] = None,
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

    Compares the tuned settings with those before tuning, in interleaved windows of at
    least three rounds. Your own code is compared with the defaults of your functions or
    their library; the bundled trainer also with HF Trainer and the paper's trainer.
    --against compares the profile with others instead.
    """
    from autotune.base.answer_json import answer_json
    from autotune.baseline.sections import baseline_text, comparison_text
    from autotune.baseline.stage import (
        compare_profiles,
        compare_recipes,
        open_bench_of,
    )
    from autotune.profiles.local_probe import require_local_probe
    from autotune.profiles.measuring_commands import profile_job, sweep_request
    from autotune.profiles.store import read_profile
    from autotune.subjects.requested import assignments
    from autotune.trials.decide.least_time import sweep_time_text

    before = assignments("--untuned", untuned or ())
    stored = read_profile(sweep.profile)
    others = [read_profile(path) for path in against or ()]
    for profile in (stored, *others):
        if profile.profile.has_train:
            require_local_probe(profile)
    request = sweep_request(sweep, stored, job.reports, time_limit_s, window_s=window_s)
    subject = stored.profile.subject
    purpose = (
        f"Measures the speedup of the tuned {subject.name}, and writes it into"
        f" {stored.path}."
    )
    if others:
        names = ", ".join(str(other.path) for other in others)
        purpose = f"Compares {stored.path} with {names}."
    if job.submitted_or_rejected(
        context, profile_job("baseline", purpose, stored, request)
    ):
        return
    device = stored.profile.fingerprint.device
    sys.stderr.write(sweep_time_text("baseline", device, window_s, time_limit_s))
    if others:
        with open_bench_of(stored, request, beside_others=True) as bench:
            comparison = compare_profiles(
                bench, stored, others, request, data=sweep.data, rounds=rounds
            )
        if job.as_json:
            print(answer_json(comparison))
        else:
            print(comparison_text(comparison))
        return
    with open_bench_of(stored, request, beside_others=False) as bench:
        comparison = compare_recipes(
            bench, stored, request, rounds=rounds, untuned=before
        )
    if job.as_json:
        print(answer_json(comparison))
    else:
        print(baseline_text(comparison, sweep.profile))
