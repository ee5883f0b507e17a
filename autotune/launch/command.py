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

        Args:
            ranks: Ranks per node; None for those of the profile.
            site_requires_approval: True if the site file requires approved profiles.
            torch_of_profile: True if ranks run the profile's torch, not the one here.

        Raises:
            TrainerError: If the profile, a setting or the dataset cannot be used.
            ProfileRejected: If the profile is of another dataset, or not approved.
            MachineLacks: If the torch to run is not installed.
        """
        from autotune.launch.training_job import TrainRequest, default_ranks
        from autotune.machine.host import SystemHost
        from autotune.profiles.approval import reject_other_settings, require_approved
        from autotune.profiles.store import StoredProfile, read_trainer_profile
        from trainer.config.resolve import resolve
        from trainer.formats.code_hash import code_sha256
        from trainer.formats.manifest import read_manifest
        from trainer.record.writer import default_run_directory

        must_be_approved = self.require_approved or site_requires_approval
        approved = None
        stored: StoredProfile
        if must_be_approved:
            approved = require_approved(self.profile, self.reports)
            stored = approved
        else:
            stored = read_trainer_profile(self.profile, "train")
        approved_sha256 = None if approved is None else approved.file_sha256
        fingerprint = stored.profile.fingerprint
        assignments = self.assignments or []
        resolved = resolve(
            self.profile,
            assignments=assignments,
            data=self.data,
            expect_sha256=approved_sha256,
        )
        if approved is not None:
            reject_other_settings(approved, resolved.config)
        dataset_hash = read_manifest(resolved.data_dir).dataset_hash
        if dataset_hash != fingerprint.dataset_hash:
            raise ProfileRejected(
                f"{str(resolved.data_dir)!r} does not match the profile's dataset: its"
                f" hash begins {dataset_hash[:12]}, not"
                f" {fingerprint.dataset_hash[:12]}",
                next_step=(
                    "Name the profile's dataset with --data DIR; or tune with this one:"
                    " autotune tune"
                ),
            )
        if torch_of_profile:
            torch_version: str | None = fingerprint.torch
        else:
            torch_version = SystemHost().library_versions().get("torch")
        if torch_version is None:
            raise MachineLacks(
                "torch is not installed", next_step="Install it: pip install torch"
            )
        return TrainRequest(
            profile_path=self.profile,
            profile=stored.profile,
            config=resolved.config,
            data_dir=Path(os.path.normpath(resolved.data_dir)),
            assignments=assignments,
            run=self.out or default_run_directory(resolved.config.model.name),
            ranks=ranks or default_ranks(stored.profile),
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
    is_set = {
        "--nodes": nodes is not None,
        "--time-limit": time_limit_s is not None,
        "--chain": chain is not None,
        "--wait": job.wait,
        "--dry-run": job.dry_run,
        "--json": job.as_json,
    }
    for name, was_set in is_set.items():
        if was_set:
            raise UsageError(f"{name} requires --slurm", next_step="Add --slurm")
    _train_here(options, ranks)


def _train_here(options: TrainOptions, ranks: int | None) -> None:
    """Run torchrun on this node, and exit with the code of the run."""
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
    exit_text_before = exit_text(request.run)
    code = run_child(command, threads | os.environ)
    if is_of_a_rank(code) and exit_text(request.run) == exit_text_before:
        # Training did not begin, and the rank has printed why.
        raise typer.Exit(code)
    ending = run_end_of(request.run, exit_text_before, code, patience_s=PATIENCE_HERE_S)
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
    """Submit training as one job, or as a chain of dependent jobs."""
    from autotune.base.files import write_atomically
    from autotune.cluster.job_script import read_template
    from autotune.cluster.site_file import DEFAULT_SITE, find_site
    from autotune.cluster.slurm import submit as submit_script
    from autotune.launch.training_job import train_script
    from autotune.machine.host import SystemHost
    from trainer.config.resolve import modified_text
    from trainer.formats.profile_file import is_modified, read_profile_tables

    site, site_path = find_site(job.slurm or DEFAULT_SITE, os.environ)
    # The torch of a container or of another Python cannot be read here.
    has_other_torch = bool(site.python or site.command_prefix)
    has_no_torch = "torch" not in SystemHost().library_versions()
    request = options.request(
        ranks=ranks,
        site_requires_approval=site.require_approved,
        torch_of_profile=has_other_torch or has_no_torch,
    )
    request = replace(
        request,
        python=site.python or sys.executable,
        nodes=nodes,
        chain=chain,
        time=None if time_limit_s is None else _slurm_time(time_limit_s),
    )
    if is_modified(read_profile_tables(options.profile)):
        sys.stderr.write(modified_text(options.profile))
    script = train_script(request, site, read_template("train", site, site_path))
    if job.dry_run:
        job.print_scripts([script])
        return
    write_atomically(request.script, script)
    request.log.parent.mkdir(parents=True, exist_ok=True)
    job_ids = []
    for link in range(1, chain + 1):
        # The script's argument is the job's number in a chain.
        arguments = [str(link)] if chain > 1 else []
        job_ids.append(submit_script(request.script, arguments))
    log = str(request.log).replace("%j", job_ids[-1])
    paths = {"run": str(request.run), "script": str(request.script), "log": log}
    if not job.as_json:
        print(f"{'job':<7}{', '.join(job_ids)}")
        for name, path in paths.items():
            print(f"{name:<7}{path}")
        print(f"next: {command('status', request.run)}", flush=True)
    job.finish([(job_ids[-1], Path(log))], {"jobs": job_ids, **paths})


def _slurm_time(duration_s: float) -> str:
    """Return a duration, rounded up, as SLURM reads it: ``1-02:30:00``."""
    minutes, seconds = divmod(math.ceil(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}"


def status(
    directories: Annotated[
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

    for directory in directories or []:
        if not directory.is_dir():
            raise BadInput(
                f"{str(directory)!r} is not a directory",
                next_step="Name a run, or the directory of a report.",
            )
    jobs = queued_jobs()
    run_directories, report_directories = find_runs_and_tunings(
        directories or [], runs, reports
    )
    run_states = [run_status(directory, jobs) for directory in run_directories]
    tuning_states = [tuning_status(directory) for directory in report_directories]
    has_queue = jobs is not None
    if as_json:
        answer = {
            "slurm_asked": has_queue,
            "runs": run_states,
            "tunings": tuning_states,
        }
        print(answer_json(answer))
    else:
        print(status_text(run_states, tuning_states, has_queue=has_queue))
