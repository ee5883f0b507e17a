"""``autotune train`` and ``autotune status``.

The first trains from a profile, here or as a SLURM job. The second shows runs and
tunings.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.console import options as opt
from autotune.console.slurm_job import SlurmOptions
from autotune.errors import BadInput, MachineLacks, ProfileRejected, UsageError
from autotune.profiles.decide.follow_up import command

if TYPE_CHECKING:
    from autotune.launch.training_job import TrainRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Profile and dataset to train from, and the run directory."""

    profile: opt.OneProfile
    data: opt.ProfileData = None
    out: Annotated[
        Path | None,
        opt.option("DIR", "Run directory; a run in it resumes. Default: new in runs/."),
    ] = None
    assignments: Annotated[
        list[str] | None,
        opt.option("train.KEY=VALUE", "Override a setting; repeatable.", "--set"),
    ] = None
    require_approved: opt.RequireApproved = False
    reports: opt.Reports = opt.REPORTS

    def request(
        self,
        *,
        ranks: int | None,
        site_requires_approval: bool,
        torch_of_profile: bool = False,
    ) -> "TrainRequest":
        """Read and check profile and dataset.

        With ``torch_of_profile``, ranks run the profile's torch, not the one here.
        """
        from autotune.launch.training_job import TrainRequest, default_ranks
        from autotune.machine.host import SystemHost
        from autotune.profiles.approval import reject_other_settings, require_approved
        from autotune.profiles.store import read_trainer_profile
        from trainer.config.resolve import resolve
        from trainer.formats.code_hash import code_sha256
        from trainer.formats.manifest import read_manifest
        from trainer.record.writer import default_run_directory

        must_be_approved = self.require_approved or site_requires_approval
        approved = (
            require_approved(self.profile, self.reports) if must_be_approved else None
        )
        approved_sha256 = None if approved is None else approved.file_sha256
        stored = (approved or read_trainer_profile(self.profile, "train")).profile
        assignments = self.assignments or []
        resolved = resolve(
            self.profile,
            assignments=assignments,
            data=self.data,
            expect_sha256=approved_sha256,
        )
        if approved is not None:
            reject_other_settings(approved, resolved.config)
        there, tuned_on = (
            read_manifest(resolved.data_dir).dataset_hash,
            stored.fingerprint.dataset_hash,
        )
        if tuned_on != there:
            raise ProfileRejected(
                f"{str(resolved.data_dir)!r} does not match the profile's dataset: its"
                f" hash begins {there[:12]}, not {tuned_on[:12]}",
                next_step=(
                    "Name the profile's dataset with --data DIR; or tune with this one:"
                    " autotune tune"
                ),
            )
        torch_version = (
            stored.fingerprint.torch
            if torch_of_profile
            else SystemHost().library_versions().get("torch")
        )
        if torch_version is None:
            raise MachineLacks(
                "torch is not installed", next_step="Install it: pip install torch"
            )
        return TrainRequest(
            profile_path=self.profile,
            profile=stored,
            config=resolved.config,
            data_dir=Path(os.path.normpath(resolved.data_dir)),
            assignments=assignments,
            run=self.out or default_run_directory(resolved.config.model.name),
            ranks=ranks or default_ranks(stored),
            torch_version=torch_version,
            code_sha256=code_sha256(),
            directory=Path.cwd(),
            reviews=self.reports if must_be_approved else None,
            approved_sha256=approved_sha256,
        )


@opt.grouped
def train(
    *,
    options: TrainOptions,
    ranks: opt.NodeRanks = None,
    nodes: Annotated[int | None, opt.NODES] = None,
    time_limit_s: Annotated[
        float | None,
        opt.duration(
            "--time-limit",
            "4h",
            "Time limit of the job. Default: the site's.",
            least_s=1,
        ),
    ] = None,
    chain: Annotated[
        int | None,
        opt.option(
            "N",
            "Submit N dependent jobs (without requeue).",
            advanced=True,
            min=1,
            max=100,
        ),
    ] = None,
    job: SlurmOptions,
) -> None:
    """Train from a profile, here or as a SLURM job.

    Exits with the code of the run. A job resumes after time limits and pre-emption
    until the run is complete. --nodes, --time-limit and --chain require --slurm.
    """
    if job.slurm is not None:
        _submit(
            options,
            job,
            ranks=ranks,
            nodes=nodes or 1,
            time_limit_s=time_limit_s,
            chain=chain or 1,
        )
        return
    given = {
        "--nodes": nodes,
        "--time-limit": time_limit_s,
        "--chain": chain,
        "--wait": job.wait or None,
    }
    given |= {"--dry-run": job.dry_run or None, "--json": job.as_json or None}
    for name in (name for name, value in given.items() if value is not None):
        raise UsageError(f"{name} requires --slurm", next_step="Add --slurm")
    _train_here(options, ranks)


def _train_here(options: TrainOptions, ranks: int | None) -> None:
    from autotune.cluster.site_file import DEFAULT_SITE, find_site
    from autotune.cluster.torchrun import run_child, torchrun_command
    from autotune.launch.run_end import (
        PATIENCE_HERE_S,
        exit_text,
        is_of_a_rank,
        run_end_of,
    )
    from autotune.launch.training_job import term_lead_s, trainer_arguments

    # Only this setting of the site file applies here: the others are for jobs.
    site, _ = find_site(DEFAULT_SITE, os.environ)
    request = options.request(ranks=ranks, site_requires_approval=site.require_approved)
    command = torchrun_command(
        request.python,
        trainer_arguments(request, stage_to=None),
        ranks=request.ranks,
        torch_version=request.torch_version,
        shutdown_s=term_lead_s(request),
    )
    # Torchrun would set it as well, with a warning.
    threads = {"OMP_NUM_THREADS": "1"} if request.ranks > 1 else {}
    said_before = exit_text(request.run)
    code = run_child(command, threads | os.environ)
    if is_of_a_rank(code) and exit_text(request.run) == said_before:
        # Training did not begin, and the rank has printed why.
        raise typer.Exit(code)
    ending = run_end_of(request.run, said_before, code, patience_s=PATIENCE_HERE_S)
    if ending.code:
        sys.stderr.write(f"launch: {ending.words}\n")
        raise typer.Exit(ending.code)


def _submit(
    options: TrainOptions,
    job: SlurmOptions,
    *,
    ranks: int | None,
    nodes: int,
    time_limit_s: float | None,
    chain: int,
) -> None:
    from autotune.base.files import write_atomically
    from autotune.cluster.job_script import read_template
    from autotune.cluster.site_file import DEFAULT_SITE, find_site
    from autotune.cluster.slurm import submit as submit_script
    from autotune.launch.training_job import train_script
    from autotune.machine.host import SystemHost
    from trainer.config.resolve import modified_text
    from trainer.formats.profile_file import is_modified, read_profile_tables

    hours, seconds = divmod(math.ceil(time_limit_s or 0), 3600)
    clock = f"{hours // 24}-{hours % 24:02d}:{seconds // 60:02d}:{seconds % 60:02d}"
    time = None if time_limit_s is None else clock
    cluster, site_path = find_site(job.slurm or DEFAULT_SITE, os.environ)
    there = (
        bool(cluster.python or cluster.command_prefix)
        or "torch" not in SystemHost().library_versions()
    )
    request = options.request(
        ranks=ranks,
        site_requires_approval=cluster.require_approved,
        torch_of_profile=there,
    )
    request = replace(
        request,
        python=cluster.python or sys.executable,
        nodes=nodes,
        chain=chain,
        time=time,
    )
    if is_modified(read_profile_tables(options.profile)):
        sys.stderr.write(modified_text(options.profile))
    script = train_script(request, cluster, read_template("train", cluster, site_path))
    if job.dry_run:
        print(script, end="")
        return
    write_atomically(request.script, script)
    request.log.parent.mkdir(parents=True, exist_ok=True)
    ids = [
        submit_script(request.script, [str(link)] if chain > 1 else [])
        for link in range(1, chain + 1)
    ]
    log = str(request.log).replace("%j", ids[-1])
    told = {"run": str(request.run), "script": str(request.script), "log": log}
    if not job.as_json:
        for name, value in {"job": ", ".join(ids), **told}.items():
            print(f"{name:<7}{value}")
        print(f"next: {command('status', request.run)}", flush=True)
    job.finish([(ids[-1], Path(log))], {"jobs": ids, **told})


def status(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            help="Runs or report directories. Default: all in --runs and --reports.",
        ),
    ] = None,
    *,
    runs: Annotated[Path, opt.option("DIR", "Directory of runs.")] = Path("runs"),
    reports: opt.Reports = opt.REPORTS,
    as_json: opt.AsJson = False,
) -> None:
    """Show the state of training runs and tunings.

    Queries SLURM if it is available.
    """
    from autotune.base.answer_json import answer_json
    from autotune.cluster.slurm import queued_jobs
    from autotune.launch.sections import status_text
    from autotune.launch.status import find_runs_and_tunings, run_status, tuning_status

    for place in places or []:
        if not place.is_dir():
            raise BadInput(
                f"{str(place)!r} is not a directory",
                next_step="Name a run, or the directory of a report.",
            )
    jobs = queued_jobs()
    run_places, report_places = find_runs_and_tunings(list(places or []), runs, reports)
    of_runs = [run_status(place, jobs) for place in run_places]
    tunings = [tuning_status(place) for place in report_places]
    if as_json:
        print(
            answer_json(
                {"slurm_asked": jobs is not None, "runs": of_runs, "tunings": tunings}
            )
        )
    else:
        print(status_text(of_runs, tunings, asked=jobs is not None))
