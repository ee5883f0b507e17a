"""``autotune workers``: the fewest DataLoader workers that do not cost throughput.

Functions import the modules that they need, so that other commands start fast.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import WINDOW_S
from autotune.console import options as opt
from autotune.console.slurm_job import JobOptions, JobRequest

if TYPE_CHECKING:
    from autotune.evidence.probe import ProbeEvidence
    from autotune.machine.measured_device import DeviceChoice
    from autotune.profiles.store import StoredProfile, WrittenProfile
    from autotune.subjects.subject import Subject
    from autotune.trials.sweep_request import SweepRequest

_OPTIONS_OF_OWN_LOADER = frozenset(
    {
        "profile",
        "ranks",
        "step",
        "arguments",
        "subject",
        "per_size",
        "along",
        "loader",
        "window_s",
        "max_workers",
        "time_limit_s",
        "step_time_s",
        "study_file",
        "device",
        "trial_timeout_s",
        "slurm",
        "wait",
        "dry_run",
        "as_json",
        "here",
        "reports",
    }
)
"""Parameters of the command that apply to a sweep of your own loader. The options of
all others are rejected with it."""


@opt.grouped
def workers(
    context: typer.Context,
    *,
    sweep: opt.WorkersOptions,
    own: opt.OwnOptions,
    loader: Annotated[
        str | None,
        opt.option(
            "MODULE:FUNCTION", "Your own loader instead: build_loader(num_workers)."
        ),
    ] = None,
    window_s: opt.Window = WINDOW_S,
    max_workers: Annotated[
        int | None,
        opt.option(
            "N",
            "Maximum DataLoader workers per GPU. Default: its share of the CPUs.",
            min=0,
            max=4096,
        ),
    ] = None,
    time_limit_s: Annotated[float, opt.time_limit("10min")] = 600.0,
    step_time_s: Annotated[
        float | None,
        opt.duration(
            "--step-time",
            "120ms",
            "Replay a GPU step of this duration instead; needs no GPU.",
            least_s=1e-4,
        ),
    ] = None,
    device: opt.Device = "auto",
    study_file: opt.Study = None,
    job: JobOptions,
) -> None:
    """Find the fewest DataLoader workers that suffice.

    Measures at the probed micro-batch size, and writes num_workers into the profile.
    The time limit may leave several numbers undecided. With --loader, your own loader
    is measured, with --step or --step-time as its consumer.
    """
    if study_file is not None:
        from autotune.trials.study import check_study_file

        check_study_file(study_file)
    if loader is not None or own.step is not None or _has_loader(sweep.profile):
        from autotune.subjects.requested import requested_subjects
        from autotune.trials.sweep_request import SweepRequest
        from autotune.workers.own_loader import loader_to_sweep

        own.reject_others(context, kept=_OPTIONS_OF_OWN_LOADER)
        own_request = SweepRequest(
            reports=job.reports,
            budget_s=time_limit_s,
            budget_ends_s=time.time() + time_limit_s,
            local_ranks=sweep.ranks,
            max_workers=max_workers,
            window_s=window_s,
            replayed_step_s=step_time_s,
            trial_timeout_s=sweep.trial_timeout_s,
            study_file=study_file,
        )
        code = loader_to_sweep(
            requested_subjects(own, loader=loader), sweep.profile, own_request
        )
        _sweep_own(context, code, own_request, device, job, out=sweep.profile)
        return
    own.reject_without_function("autotune workers --loader my_module:build_loader")
    from autotune.profiles.local_probe import require_local_probe
    from autotune.profiles.measuring_commands import sweep_request
    from autotune.profiles.store import read_trainer_profile

    stored = read_trainer_profile(
        sweep.required(),
        "workers without --loader",
        next_step="Add your own loader: --loader MODULE:build_loader",
    )
    probe = require_local_probe(stored)
    request = sweep_request(
        sweep,
        stored,
        reports=job.reports,
        time_limit_s=time_limit_s,
        window_s=window_s,
        max_workers=max_workers,
        replayed_step_s=step_time_s,
        study_file=study_file,
    )
    _sweep_profile(context, stored, probe, request, job)


def _has_loader(profile: Path) -> bool:
    """Return whether a profile is of your own code, and names its loader."""
    from autotune.profiles.store import read_profile

    if not profile.is_file():
        return False
    stored = read_profile(profile).profile
    return not stored.has_train and stored.subject.has_loader


def _sweep_own(
    context: typer.Context,
    subject: "Subject",
    request: "SweepRequest",
    choice: "DeviceChoice",
    job: JobOptions,
    *,
    out: Path,
) -> None:
    """Find the fewest workers of your own loader."""
    from autotune.profiles.store import read_profile
    from autotune.trials.decide.least_time import sweep_time_text
    from autotune.workers.decide.window_time import (
        known_step_s,
        least_window_s,
        longer_words,
    )
    from autotune.workers.own_loader import sweep_own

    loader = subject.code().get("loader", subject.words)
    job_request = JobRequest(
        name=f"workers-{subject.name}",
        purpose=f"Finds the workers that {loader} needs.",
        expected_minutes=request.budget_s / 60 + 1,
        trial_timeout_s=request.trial_timeout_s,
        ranks=request.local_ranks or 1,
        on_gpus=request.replayed_step_s is None and choice != "cpu",
        reports=job.reports,
    )
    if job.submitted_or_rejected(context, job_request):
        return
    # The start of a trial of your code may take longer: a short one is assumed.
    stored = read_profile(out).profile if out.is_file() else None
    step_s = known_step_s(stored, request.replayed_step_s, request.local_ranks)
    sys.stderr.write(
        sweep_time_text(
            "workers",
            "cpu",
            least_window_s(request.window_s, step_s, "cpu"),
            request.budget_s,
            remark=longer_words(request.window_s, step_s),
        )
    )
    written = sweep_own(choice, subject, request, None if out == opt.NOT_GIVEN else out)
    _print_swept(written, job)


def _sweep_profile(
    context: typer.Context,
    stored: "StoredProfile",
    probe: "ProbeEvidence",
    request: "SweepRequest",
    job: JobOptions,
) -> None:
    """Sweep the trainer's own DataLoader for a probed profile, or submit a job for it.

    Args:
        context: Command line, which a job runs again.
        stored: Probed profile, into which the number of workers is written.
        probe: Evidence of its probe.
        request: Windows to measure, with their time budget.
        job: Options of the SLURM job and of the output.
    """
    from autotune.profiles.measuring_commands import profile_job
    from autotune.subjects.bench import open_subject
    from autotune.subjects.registry import profile_subject
    from autotune.trials.decide.least_time import sweep_time_text
    from autotune.workers.decide.window_time import (
        known_step_s,
        least_window_s,
        longer_words,
    )
    from autotune.workers.stage import sweep_loader

    train = stored.profile.train
    is_replayed = request.replayed_step_s is not None
    purpose = (
        f"Finds the DataLoader workers that {train.model.name} needs, and writes them"
        f" into {stored.path}."
    )
    job_request = profile_job(
        "workers", purpose, stored, request, on_gpus=not is_replayed
    )
    if job.submitted_or_rejected(context, job_request):
        return
    device = "cpu" if is_replayed else train.device
    step_s = known_step_s(stored.profile, request.replayed_step_s, request.local_ranks)
    sys.stderr.write(
        sweep_time_text(
            "workers",
            device,
            least_window_s(request.window_s, step_s, device),
            request.budget_s,
            remark=longer_words(request.window_s, step_s),
        )
    )
    without_gpu = _next_step_without_gpu(stored, probe)
    with open_subject(
        device,
        profile_subject(stored.profile, request.data),
        request.data,
        without_gpu=without_gpu,
    ) as bench:
        written = sweep_loader(bench, stored, request, stored.path)
    _print_swept(written, job, data=context.params["data"])


def _print_swept(
    written: "WrittenProfile", job: JobOptions, *, data: Path | None = None
) -> None:
    """Print the profile that a sweep wrote, as JSON or as text.

    ``data`` is the dataset that you named, if you named one.
    """
    from autotune.base.answer_json import answer_json
    from autotune.profiles.sections import written_answer
    from autotune.workers.sections import workers_text

    if job.as_json:
        print(answer_json(written_answer(written)))
    else:
        print(workers_text(written, data))


def _next_step_without_gpu(stored: "StoredProfile", probe: "ProbeEvidence") -> str:
    """Return the next step for a machine without the profile's GPU, as a sentence.

    It advises to replay the training step for as long as it took in the probe.
    """
    from autotune.profiles.decide.follow_up import command

    # A placeholder, if the probe did not time the micro-batch size of the profile.
    step_time = "T"
    step_s = probe.step_s_at(stored.profile.train.micro_batch_size)
    if step_s is not None:
        step_time = f"{1e3 * step_s:.4g}ms"
    return (
        "Run it where the profile was probed; or, on a node with the same CPU and"
        " disk, replay the step that the probe measured:"
        f" {command('workers', stored.path, step_time=step_time)}"
    )
