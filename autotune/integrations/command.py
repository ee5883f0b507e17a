"""``autotune probe --step`` and ``autotune workers --loader``: your training code."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autotune.console.options import NOT_GIVEN, OwnOptions
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.integrations.values import StepProbe
    from autotune.machine.measured_device import DeviceChoice
    from autotune.subjects.own.subject import OwnCode
    from autotune.trials.sweep_request import SweepRequest


def probe_own(
    context: typer.Context,
    own: OwnOptions,
    probe: "StepProbe",
    choice: "DeviceChoice",
    job: JobOptions,
    *,
    out: Path | None,
    time_limit_s: float | None,
) -> None:
    """Find the largest size of your step, for each combination of arguments."""
    from autotune.base.answer_json import answer_json
    from autotune.integrations.stage import probe_own as run
    from autotune.memory.sections.own_step import own_probe_text
    from autotune.profiles.sections import written_answer
    from autotune.subjects.requested import requested_subjects

    codes = requested_subjects(own)
    if len(codes) > 1 and out is not None and out.suffix == ".toml":
        raise UsageError(
            f"--out {out} names one file for {len(codes)} profiles",
            next_step="Pass a directory.",
        )
    asked = JobRequest(
        name=f"probe-{codes[0].name}",
        purpose=f"Finds the largest size of {own.step}, and writes a profile.",
        expected_minutes=1 + 3 * len(codes),
        trial_timeout_s=probe.trial_timeout_s,
        ranks=1,
        on_gpus=choice != "cpu",
        reports=job.reports,
    )
    if job.submitted_or_rejected(context, asked):
        return
    ends_s = None if time_limit_s is None else time.time() + time_limit_s
    found = [
        run(choice, replace(probe, code=code), out, ends_s=ends_s) for code in codes
    ]
    print(
        answer_json({"steps": [written_answer(one) for one in found]})
        if job.as_json
        else own_probe_text(found)
    )


def sweep_own(
    context: typer.Context,
    code: "OwnCode",
    request: "SweepRequest",
    choice: "DeviceChoice",
    job: JobOptions,
    *,
    out: Path,
) -> None:
    """Find the fewest workers of your own loader."""
    from autotune.base.answer_json import answer_json
    from autotune.integrations.stage import sweep_own as run
    from autotune.profiles.sections import written_answer
    from autotune.trials.decide.least_time import sweep_time_text
    from autotune.workers.sections import own_workers_text

    asked = JobRequest(
        name=f"workers-{code.name}",
        purpose=f"Finds the workers that {code.loader_function or code.words} needs.",
        expected_minutes=request.budget_s / 60 + 1,
        trial_timeout_s=request.trial_timeout_s,
        ranks=request.local_ranks or 1,
        on_gpus=request.replayed_step_s is None and choice != "cpu",
        reports=job.reports,
    )
    if job.submitted_or_rejected(context, asked):
        return
    # The time of a trial of your code is unknown: a short one is assumed.
    sys.stderr.write(
        sweep_time_text("workers", "cpu", request.window_s, request.budget_s)
    )
    found = run(choice, code, request, None if out == NOT_GIVEN else out)
    print(
        answer_json(written_answer(found)) if job.as_json else own_workers_text(found)
    )
