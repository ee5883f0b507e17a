"""``autotune confirm``: the throughput that a profile promises, and training delivers.

Windows of training and a short training are measured, and written into the profile.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import CONFIRM_ROUNDS, CONFIRM_WINDOW_S
from autotune.console.options import (
    SweepOptions,
    duration,
    grouped,
    option,
    time_limit,
)
from autotune.console.slurm_job import JobOptions

if TYPE_CHECKING:
    from autotune.confirm.training import ConfirmedTraining
    from autotune.profiles.store import StoredProfile
    from autotune.trials.sweep_request import SweepRequest


@grouped
def confirm(
    context: typer.Context,
    *,
    sweep: SweepOptions,
    window_s: Annotated[
        float,
        duration(
            "--window",
            "30s",
            "Duration of one timed window. Longer windows narrow the interval.",
            CONFIRM_WINDOW_S,
            least_s=0.1,
        ),
    ] = CONFIRM_WINDOW_S,
    rounds: Annotated[
        int,
        option(
            "N",
            "Maximum rounds of windows; fewer once the interval is within 2.5 %.",
            min=3,
            max=100,
        ),
    ] = CONFIRM_ROUNDS,
    time_limit_s: Annotated[float, time_limit("10min")] = 600.0,
    job: JobOptions,
) -> None:
    """Measure what training from a profile delivers.

    Promises a rate from windows of training, each a separate process, then trains for a
    tenth of the time limit, at most a minute. If another split of the global batch is
    surely faster, the profile gets it. Your own code trains with its own loader.
    """
    from autotune.base.answer_json import answer_json
    from autotune.confirm.decide import training_s
    from autotune.confirm.sections import confirm_text
    from autotune.confirm.stage import confirm_profile
    from autotune.profiles.local_probe import require_local_probe
    from autotune.profiles.measuring_commands import profile_job, sweep_request
    from autotune.profiles.store import read_profile
    from autotune.trials.decide.least_time import sweep_time_text

    stored = read_profile(sweep.profile)
    require_local_probe(stored)
    profile = stored.profile
    request = sweep_request(sweep, stored, job.reports, time_limit_s, window_s=window_s)
    purpose = (
        f"Measures what training {profile.subject.words} delivers, and writes it into"
        f" {stored.path}."
    )
    if job.submitted_or_rejected(
        context, profile_job("confirm", purpose, stored, request)
    ):
        return
    sys.stderr.write(sweep_time_text("confirm", profile.device, window_s, time_limit_s))
    with _opened(stored, request) as training:
        confirmed = confirm_profile(
            training,
            budget_s=time_limit_s,
            training_s=training_s(time_limit_s, models=1),
            max_rounds=rounds,
        )
    if job.as_json:
        print(answer_json(confirmed))
    else:
        print(confirm_text(confirmed, stored))


@contextlib.contextmanager
def _opened(
    stored: "StoredProfile", request: "SweepRequest"
) -> "Iterator[ConfirmedTraining]":
    """Open this machine for training from a profile of any subject."""
    from autotune.confirm.subject_training import training_of
    from autotune.subjects.bench import open_subject
    from autotune.subjects.registry import profile_subject

    profile = stored.profile
    with open_subject(
        profile.device,
        profile_subject(profile, request.data),
        request.data,
        import_timeout_s=request.trial_timeout_s,
    ) as bench:
        yield training_of(bench, stored, request)
