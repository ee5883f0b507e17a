"""Commands that submit themselves as a SLURM job, and do not run on login nodes.

``--slurm [SITE] [--wait] [--dry-run]``: the job runs the command that you typed without
these options. Another job may follow.
"""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cluster.slurm import Ended, follow, read_slurm, submit
from autotune.console.options import REPORTS, AsJson, Reports, flag, option, sites
from autotune.errors import BadInput, MachineLacks, UsageError

START_UP_S = 60.0
"""Seconds until a job's first trial begins: starting, and loading torch from a network
file system."""
_PASSED_ON = ("AUTOTUNE_DATA", "AUTOTUNE_SITE")
_HELP = "Submit as a SLURM job. Site file: AUTOTUNE_SITE, else site.toml."


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """Request to run a command as a job."""

    name: str
    """Short name of the job, its script and its log."""
    purpose: str
    """One line about the question that it answers."""
    trial_log: str | None = None
    """Path of the trial log, as far as it is known before the job runs."""
    expected_minutes: float | None = None
    """Expected duration; None if it is unknown."""
    trial_timeout_s: float | None = None
    """Longest single trial: a job that could not hold one is not submitted. None if
    there are no trials."""
    nodes: int = 1
    ranks: int | None = None
    """Ranks per node; None for one per GPU of the site's nodes."""
    on_gpus: bool = True
    cpus: int | None = None
    """CPU cores per node; None for the site's."""
    with_srun: bool = True
    """True for one process per node; if False, the command runs once, on the first, and
    starts the others itself."""
    reports: Path = REPORTS
    command: Sequence[str] | None = None
    """Command that the job runs, after the program's name; None for the command that
    you typed."""
    then: "Callable[[str], JobRequest] | None" = None
    """Function that makes a second job from the first one's id; it begins once the
    first has succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options to run a command as a job, and to choose its output."""

    slurm: Annotated[
        str | None, option("[SITE]", _HELP, "--slurm", autocompletion=sites)
    ] = None
    wait: Annotated[
        bool, flag("--wait", "Wait for the job (with --slurm), and exit with its code.")
    ] = False
    dry_run: Annotated[
        bool,
        flag(
            "--dry-run", "Print the job script (with --slurm) instead of submitting it."
        ),
    ] = False
    as_json: AsJson = False

    def submitted(self, context: typer.Context, request: JobRequest) -> bool:
        """Submit or print the job if ``--slurm`` is set.

        Returns:
            True if nothing is left to do.

        Raises:
            UsageError: If ``--wait`` or ``--dry-run`` is set without ``--slurm``.
            AutotuneError: If SLURM rejects or ends the job, or the site file cannot be
                used.
            TrainerError: If the site file is invalid.
        """
        from autotune.cluster.job_script import (
            Shape,
            cpus_of,
            measure_script,
            read_template,
        )
        from autotune.cluster.site_file import find_site

        if self.slurm is None:
            if self.wait or self.dry_run:
                option = "--wait" if self.wait else "--dry-run"
                raise UsageError(
                    f"{option} means nothing without --slurm", next_step="Add --slurm."
                )
            return False
        site, site_path = find_site(self.slurm, os.environ)
        template = read_template("measure", site, site_path)

        def script_of(one: JobRequest) -> str:
            if (
                one.trial_timeout_s is not None
                and START_UP_S + one.trial_timeout_s > site.slurm.time_s
            ):
                raise BadInput(
                    f"the job's time limit, {site.slurm.time}, cannot hold its start"
                    f" ({START_UP_S:g} s) and one trial ({one.trial_timeout_s:g} s)",
                    next_step=(
                        f"Raise slurm.time in {site_path or 'a site file (site.toml)'},"
                        " or bound trials: --trial-timeout"
                        f" {max(1.0, site.slurm.time_s - START_UP_S):g}s"
                    ),
                )
            gpus = (one.ranks or site.slurm.gpus_per_node or 1) if one.on_gpus else 0
            cpus = cpus_of(
                site, one.ranks or max(1, gpus), one.cpus or site.slurm.cpus_per_task
            )
            words = (
                command_in_job(context.find_root().obj)
                if one.command is None
                else one.command
            )
            return measure_script(
                site,
                template,
                name=one.name,
                purpose=one.purpose,
                with_srun=one.with_srun,
                directory=Path.cwd(),
                command=[site.python or sys.executable, "-P", "-m", "autotune", *words],
                typed=one.command is None,
                shape=Shape(nodes=one.nodes, gpus=gpus, cpus=cpus),
                log=one.reports / "jobs" / f"{one.name}-%j.log",
                variables={
                    name: os.environ[name]
                    for name in _PASSED_ON
                    if os.environ.get(name)
                },
            )

        if self.dry_run:
            second = request.then and request.then("JOB")  # which has no number yet
            print(
                "\n".join(
                    script_of(one) for one in (request, second) if one is not None
                ),
                end="",
            )
            return True
        jobs = [_submit(request, script_of(request), site.slurm.time)]
        if request.then is not None:
            second = request.then(jobs[0]["job"])
            jobs.append(
                _submit(
                    second, script_of(second), site.slurm.time, after=jobs[0]["job"]
                )
            )
        if not self.as_json:
            print("\n\n".join(map(_job_text, jobs)), flush=True)
        self.finish(
            [(job["job"], Path(job["log"])) for job in jobs],
            {**jobs[0], "then": jobs[1:]},
        )
        return True

    def finish(self, jobs: Sequence[tuple[str, Path]], answer: dict[str, Any]) -> None:
        """Wait for jobs (id, log) and print ``answer`` as JSON, if requested.

        It exits with the first failure's code.
        """
        from autotune.base.answer_json import answer_json

        ended = Ended(code=0)
        for number, log in jobs if self.wait else ():
            ended = follow(
                number,
                log,
                functools.partial(print, f"job {number}:", file=sys.stderr, flush=True),
            )
            if ended.code:
                break
        if self.as_json:
            print(
                answer_json({**answer, "exit_code": ended.code if self.wait else None})
            )
        if ended.code:
            sys.stderr.write(f"error: {ended.words}\n")
            raise SystemExit(ended.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(SlurmOptions):
    """Options to choose where a measuring command runs, and its output."""

    here: Annotated[
        bool, flag("--here", "Allow measuring on a login node.", advanced=True)
    ] = False
    reports: Reports = REPORTS

    def submitted_or_rejected(
        self, context: typer.Context, request: JobRequest
    ) -> bool:
        """Do as ``submitted``, but not on a login node, which people share.

        Raises:
            MachineLacks: On a login node, unless ``here`` is set.
        """
        if self.submitted(context, request):
            return True
        if not self.here and read_slurm().is_login_node:
            as_job = shlex.join(["autotune", *context.find_root().obj, "--slurm"])
            raise MachineLacks(
                "this looks like a login node (sbatch is on PATH, and this is no SLURM"
                " job): measurements belong on a compute node",
                next_step=f"Submit it: {as_job}. To measure here all the same: --here.",
                docs="login-node",
            )
        return False


def command_in_job(arguments: Sequence[str]) -> list[str]:
    """Return the command line without the options that make it a job. Pure.

    ``arguments`` come from ``plain_arguments``.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*kept, word, *words]
        if word == "--slurm":
            next(words, None)
        elif word not in ("--wait", "--dry-run") and not word.startswith("--slurm="):
            kept.append(word)
    return kept


def _submit(
    request: JobRequest, script: str, limit: str, after: str | None = None
) -> dict[str, Any]:
    from autotune.base.files import write_atomically
    from trainer.formats.events import utc_now

    place = request.reports / "jobs"
    path = (
        place / f"{request.name}-{utc_now().replace(':', '').replace('-', '')}.sbatch"
    )
    write_atomically(path, script)
    number = submit(path, after=after)
    return {
        "job": number,
        "expected_minutes": request.expected_minutes,
        "time_limit": limit,
        "trial_log": request.trial_log,
        "log": str(place / f"{request.name}-{number}.log"),
        "script": str(path),
    }


def _job_text(job: dict[str, Any]) -> str:
    minutes = job["expected_minutes"]
    expected = "n/a" if minutes is None else f"about {minutes:g}"
    return (
        f"job               {job['job']}\n"
        f"expected minutes  {expected}, at most {job['time_limit']} (h:min:s)\n"
        f"trial log         {job['trial_log'] or 'n/a'}\n"
        f"log               {job['log']}\nscript            {job['script']}"
    )
