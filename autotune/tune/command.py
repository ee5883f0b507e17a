"""``autotune tune``: from a model and a dataset to a tuned profile and a report.

It is one command, which you can resume.
"""

import json
import os
import shlex
import sys
from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.base.defaults import MAX_MICRO_BATCH_SIZE, WINDOW_S
from autotune.console import options as opt
from autotune.console.slurm_job import JobOptions, JobRequest
from autotune.errors import AutotuneError, UsageError

if TYPE_CHECKING:
    from autotune.tune.pipeline import TuneRequest
    from autotune.tune.subjects import SubjectsToTune
    from autotune.tune.values import TuningResult

Skippable = StrEnum(
    "Skippable",
    [
        "ESTIMATE",
        "PROBE",
        "ACCUMULATION",
        "WORKERS",
        "NETWORK",
        "CONFIRM",
        "BASELINE",
        "REPORT",
    ],
)
_OPTIONS_OF_OWN_CODE = frozenset(
    {
        "step",
        "loader",
        "vary",
        "subject",
        "per_size",
        "arguments",
        "along",
        "memory_bytes",
        "max_micro_batch_size",
        "ranks",
        "device",
        "trial_timeout_s",
        "explore",
        "time_limit_s",
        "skip",
        "window_s",
        "out",
        "study",
        "slurm",
        "wait",
        "dry_run",
        "as_json",
        "here",
        "reports",
    }
)
"""Parameters of the command that apply to your own code. The options of all others are
rejected with it."""


@opt.grouped
def tune(
    context: typer.Context,
    *,
    options: opt.ProbeOptions,
    own: opt.TunedCodeOptions,
    nodes: Annotated[int, opt.NODES] = 1,
    explore: Annotated[
        bool,
        opt.flag(
            "--explore",
            "Also search precision, attention, checkpointing, compilation, layout,"
            " micro-batch; of your own code, what --vary or its library declares.",
        ),
    ] = False,
    time_limit_s: Annotated[
        float | None, opt.time_limit("15min per model or step, 30min with --explore")
    ] = None,
    skip: Annotated[
        list[Skippable] | None,
        opt.option(
            "PHASE",
            f"Phase to skip, repeatable: {', '.join(Skippable)}.",
            advanced=True,
        ),
    ] = None,
    window_s: opt.Window = WINDOW_S,
    out: Annotated[
        Path, opt.option("DIR", "Directory of the profiles.", advanced=True)
    ] = Path("profiles"),
    study: opt.Study = None,
    job: JobOptions,
) -> None:
    """Find the fastest training settings for your data.

    Writes profiles and a report; run the same command again to resume. With --slurm and
    several nodes, a second job measures the network between two nodes. --skip probe
    uses the existing profile; --skip accumulation tunes for one micro-batch per step.
    With --step, your own training code is tuned instead of a model; phases that it
    cannot have are skipped, with the reason.
    """
    from autotune.trials.study import check_study_file
    from autotune.tune.pipeline import ORDER, TuneRequest, Tuning

    if study is not None:
        check_study_file(study)
    number = os.environ.get("SLURM_JOB_ID")
    skipped = {one.value for one in skip or ()}
    left_out = frozenset(
        stage
        for stage in ORDER
        if stage in skipped or (stage == "explore" and not explore)
    )
    subjects = _subjects_to_tune(context, options, own, job, skipped=skipped)
    names = subjects.names
    request = TuneRequest(
        subjects=subjects,
        minutes=(
            15.0 * (1 + explore) * len(names)
            if time_limit_s is None
            else time_limit_s / 60
        ),
        out=out,
        device=options.device,
        skip=left_out,
        nodes=nodes,
    )
    asked = JobRequest(
        name="tune",
        purpose=(
            f"Tunes {', '.join(names)}: micro-batch, DataLoader workers, gradient"
            " synchronisation."
        ),
        trial_log=str(job.reports / "*" / "trials"),
        trial_timeout_s=options.trial_timeout_s,
        ranks=options.ranks,
        # The last phase may exceed the limit.
        expected_minutes=1 + 1.2 * request.minutes,
        on_gpus=options.device != "cpu",
        reports=job.reports,
        then=(
            (lambda first: _second(asked, first, request))
            if nodes > 1 and "network" not in skipped
            else None
        ),
    )
    if job.submitted_or_rejected(context, asked):
        return
    tuning = Tuning(request=request)
    try:
        result = tuning.run()
    except AutotuneError:
        if tuning.has_saved:
            again = shlex.join(
                ["autotune", *context.find_root().obj, *(["--slurm"] if number else [])]
            )
            sys.stderr.write(f"tune: finished phases are saved; to resume: {again}\n")
        raise
    if number is not None:
        from autotune.base.files import write_atomically
        from autotune.tune.values import REPEATED_PHASES

        done = {stage.name for stage in result.stages if stage.status == "done"}
        found = {
            "profiles": result.profiles,
            "report": result.report,
            "repeated": [name for name in REPEATED_PHASES if name in done],
        }
        write_atomically(
            _found_by(number, job.reports), json.dumps(found, indent=1) + "\n"
        )
    _say(result, as_json=job.as_json)
    if tuning.failed:
        raise tuning.failed[0]


def _subjects_to_tune(
    context: typer.Context,
    options: opt.ProbeOptions,
    own: opt.TunedCodeOptions,
    job: JobOptions,
    *,
    skipped: Collection[str],
) -> "SubjectsToTune":
    """Return the models, or your own code, with the limits of their probes.

    Raises:
        UsageError: If options are missing, or cannot be used together.
    """
    from autotune.tune.subjects import SubjectsToTune

    window_s: float = context.params["window_s"]
    study_file: Path | None = context.params["study"]
    if own.step is None:
        own.reject_without_function("autotune tune")
        options.require("tune")
        from autotune.subjects.mlm.memory.probe_requests import probe_requests

        return SubjectsToTune(
            probes=probe_requests(
                options,
                job.reports,
                {},
                accumulate="accumulation" not in skipped,
                traced="estimate" not in skipped,
                study_file=study_file,
            ),
            window_s=window_s,
            study_file=study_file,
        )
    from autotune.memory.probe_request import MAX_SIZE
    from autotune.memory.subject_probe import SubjectProbeRequest
    from autotune.subjects.requested import requested_subjects

    own.reject_others(context, _OPTIONS_OF_OWN_CODE)
    if "accumulation" in skipped:
        raise UsageError(
            "--skip accumulation cannot be used with your own code (--step, --loader)",
            next_step="Omit it: your step decides how it accumulates gradients.",
        )
    max_size = options.max_micro_batch_size
    if max_size == MAX_MICRO_BATCH_SIZE:
        # It is a model's default, which is too small if sizes are sequence lengths.
        max_size = MAX_SIZE
    subjects = requested_subjects(own, loader=own.loader, vary=own.vary or ())
    probes = tuple(
        SubjectProbeRequest(
            subject=subject,
            reports=job.reports,
            memory_bytes=options.memory_bytes,
            max_size=max_size,
            contents="largest",
            trial_timeout_s=options.trial_timeout_s,
            ranks=options.ranks or 1,
            traced="estimate" not in skipped,
            study_file=study_file,
        )
        for subject in subjects
    )
    return SubjectsToTune(probes=probes, window_s=window_s, study_file=study_file)


def _say(result: "TuningResult", *, as_json: bool) -> None:
    from autotune.base.answer_json import answer_json
    from autotune.profiles.store import read_profile
    from autotune.tune.sections import tuning_text

    profiles = [read_profile(Path(path)).profile for path in result.profiles]
    print(answer_json(result) if as_json else tuning_text(result, profiles))


def tune_between_nodes(
    *,
    tuned: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="File that names the profiles of the tuning."
        ),
    ],
    data: opt.Data,
    time_limit_s: Annotated[float, opt.time_limit("none")],
    trial_timeout_s: opt.TrialTimeout,
    reports: opt.Reports,
) -> None:
    """Measure the network between this job's nodes."""
    from autotune.trials.sweep_request import SweepRequest
    from autotune.tune.between_nodes import measure_between_nodes

    request = SweepRequest(
        data=data,
        reports=reports,
        budget_s=time_limit_s,
        trial_timeout_s=trial_timeout_s,
    )
    _say(measure_between_nodes(tuned, request), as_json=False)


def _second(first: JobRequest, number: str, request: "TuneRequest") -> JobRequest:
    """Return the job that measures between nodes, after the one that tunes."""
    from autotune.tune.values import BUDGET_WEIGHTS

    models = len(request.subjects.names)
    of_all = sum(
        weight for name, weight in BUDGET_WEIGHTS.items() if name not in request.skip
    )
    minutes = max(1.0, request.minutes / models * BUDGET_WEIGHTS["network"] / of_all)
    command = [
        "tune-between-nodes",
        str(_found_by(number, first.reports)),
        "--data",
        str(request.subjects.data),
        "--time-limit",
        f"{minutes:.1f}min",
        "--trial-timeout",
        f"{first.trial_timeout_s:g}s",
        "--reports",
        str(first.reports),
    ]
    return replace(
        first,
        name="tune-between-nodes",
        purpose=(
            f"Measures the network between two nodes for the profiles of job {number}."
        ),
        expected_minutes=1 + 2 * minutes * models,
        nodes=2,
        with_srun=False,
        command=command,
        then=None,
    )


def _found_by(number: str, reports: Path) -> Path:
    return reports / "jobs" / f"tune-{number}.json"
