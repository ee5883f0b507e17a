"""Commands that submit themselves as a SLURM job, and do not run on login nodes.

``--slurm [SITE] [--wait] [--dry-run]``: the job runs the command that you typed without
these options. A command calls ``submitted`` of its ``SlurmOptions``, or
``submitted_or_rejected`` of its ``JobOptions`` if it measures, with a ``JobRequest``,
and returns if the answer is True. A second job may follow the first.
"""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cluster.slurm import Ended, follow, read_slurm, submit
from autotune.console.options import REPORTS, AsJson, Reports, flag, option, sites
from autotune.errors import BadInput, MachineLacks, UsageError

if TYPE_CHECKING:
    from autotune.cluster.site_file import SiteFile

START_UP_S = 60.0
"""Seconds until a job's first trial begins: starting, and loading torch from a network
file system."""
_PASSED_ON = ("AUTOTUNE_DATA", "AUTOTUNE_SITE")
"""Environment variables that the job gets."""
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
        from autotune.cluster.site_file import find_site

        if self.slurm is None:
            if self.wait or self.dry_run:
                option = "--wait" if self.wait else "--dry-run"
                raise UsageError(
                    f"{option} means nothing without --slurm", next_step="Add --slurm."
                )
            return False
        site, site_path = find_site(self.slurm, os.environ)
        typed = command_in_job(context.find_root().obj)

        def script_of(job: JobRequest) -> str:
            return _job_script(job, site, site_path, typed)

        if self.dry_run:
            scripts = [script_of(request)]
            if request.then is not None:
                # The first job has no number yet.
                scripts.append(script_of(request.then("JOB")))
            self.print_scripts(scripts)
            return True
        limit = site.slurm.time
        first = _submit(request, script_of(request), limit)
        jobs = [first]
        if request.then is not None:
            second = request.then(first["job"])
            jobs.append(_submit(second, script_of(second), limit, after=first["job"]))
        if not self.as_json:
            print("\n\n".join(map(_job_text, jobs)), flush=True)
        self.finish(
            [(job["job"], Path(job["log"])) for job in jobs],
            {**first, "then": jobs[1:]},
        )
        return True

    def print_scripts(self, scripts: Sequence[str]) -> None:
        """Print job scripts, in the order in which they would be submitted."""
        from autotune.base.answer_json import answer_json

        if self.as_json:
            print(answer_json({"scripts": scripts}))
        else:
            print("\n".join(scripts), end="")

    def finish(self, jobs: Sequence[tuple[str, Path]], answer: dict[str, Any]) -> None:
        """Wait for the jobs with ``--wait``, and print the answer with ``--json``.

        It exits with the code of the first job that failed.

        Args:
            jobs: Id and log of each job.
            answer: Answer about the jobs; it gets their exit code.
        """
        from autotune.base.answer_json import answer_json

        ended = Ended(code=0)
        if self.wait:
            for number, log in jobs:
                progress = functools.partial(
                    print, f"job {number}:", file=sys.stderr, flush=True
                )
                ended = follow(number, log, progress)
                if ended.code:
                    break
        if self.as_json:
            exit_code = ended.code if self.wait else None
            print(answer_json({**answer, "exit_code": exit_code}))
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
    command: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*command, word, *words]
        if word == "--slurm":
            next(words, None)  # its value
        elif word not in ("--wait", "--dry-run") and not word.startswith("--slurm="):
            command.append(word)
    return command


def _job_script(
    job: JobRequest, site: "SiteFile", site_path: Path | None, typed: Sequence[str]
) -> str:
    """Return the script of a job.

    Args:
        job: The job.
        site: Site file, or its defaults.
        site_path: Path of the site file; None without one.
        typed: Command line, for a job that names no command.

    Raises:
        BadInput: If the site's time limit is too short for a single trial.
    """
    from autotune.cluster.job_script import (
        Shape,
        cpus_of,
        measure_script,
        read_template,
    )

    limit_s = site.slurm.time_s
    timeout_s = job.trial_timeout_s
    if timeout_s is not None and START_UP_S + timeout_s > limit_s:
        raise BadInput(
            f"the job's time limit, {site.slurm.time}, cannot hold its start"
            f" ({START_UP_S:g} s) and one trial ({timeout_s:g} s)",
            next_step=(
                f"Raise slurm.time in {site_path or 'a site file (site.toml)'}, or"
                f" bound trials: --trial-timeout {max(1.0, limit_s - START_UP_S):g}s"
            ),
        )
    gpus = 0
    if job.on_gpus:
        gpus = job.ranks or site.slurm.gpus_per_node or 1
    ranks = job.ranks or max(1, gpus)
    cpus = cpus_of(site, ranks, job.cpus or site.slurm.cpus_per_task)
    words = typed if job.command is None else job.command
    return measure_script(
        site,
        read_template("measure", site, site_path),
        name=job.name,
        purpose=job.purpose,
        with_srun=job.with_srun,
        directory=Path.cwd(),
        command=[site.python or sys.executable, "-P", "-m", "autotune", *words],
        typed=job.command is None,
        shape=Shape(nodes=job.nodes, gpus=gpus, cpus=cpus),
        log=job.reports / "jobs" / f"{job.name}-%j.log",
        variables={
            name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)
        },
    )


def _submit(
    request: JobRequest, script: str, limit: str, after: str | None = None
) -> dict[str, Any]:
    """Write and submit a script; return the answer about the job.

    Args:
        request: The job.
        script: Its script.
        limit: Its time limit, as SLURM writes it.
        after: Id of the job that has to succeed first; None if there is none.
    """
    from autotune.base.files import write_atomically
    from trainer.formats.events import utc_now

    directory = request.reports / "jobs"
    timestamp = utc_now().replace(":", "").replace("-", "")
    script_path = directory / f"{request.name}-{timestamp}.sbatch"
    write_atomically(script_path, script)
    number = submit(script_path, after=after)
    return {
        "job": number,
        "expected_minutes": request.expected_minutes,
        "time_limit": limit,
        "trial_log": request.trial_log,
        "log": str(directory / f"{request.name}-{number}.log"),
        "script": str(script_path),
    }


def _job_text(job: dict[str, Any]) -> str:
    """Return the answer about a job as text."""
    minutes = job["expected_minutes"]
    expected = "n/a" if minutes is None else f"about {minutes:g}"
    return (
        f"job               {job['job']}\n"
        f"expected minutes  {expected}, at most {job['time_limit']} (h:min:s)\n"
        f"trial log         {job['trial_log'] or 'n/a'}\n"
        f"log               {job['log']}\n"
        f"script            {job['script']}"
    )
