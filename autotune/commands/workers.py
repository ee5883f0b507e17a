"""``autotune workers``: the smallest number of loader workers that does not cost throughput."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, TRIAL_TIMEOUT_S, AsJson, Here, ProfileData, Reports, TrialTimeout

if TYPE_CHECKING:
    from autotune.commands.measuring import Bench
    from autotune.core.evidence import ProbeEvidence, WorkersEvidence
    from autotune.core.profile import Fingerprint
    from autotune.search.profiles import StoredProfile
    from autotune.search.workers import Sweep, SweepRequest
    from trainer.dataset import Manifest


def workers(
    context: typer.Context,
    *,
    profile: Annotated[Path, typer.Option(help="A profile that autotune probe wrote on this machine.")],
    data: ProfileData = None,
    max_workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=4096, help="Try no more on each rank. Default: the CPUs allotted to this process, shared out."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that train together. Default: as the profile was probed.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for all windows; what is not decided by then is said to be undecided.")
    ] = 10.0,
    window_s: Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")] = 2.0,
    page_cache: Annotated[
        Literal["as-is", "warm", "cold"],
        typer.Option(help="Read the dataset into memory first, put it out of it before every window, or neither."),
    ] = "as-is",
    consumer_step_ms: Annotated[
        float | None,
        typer.Option(min=0.1, help="Replay a GPU's step of so long instead of training; needs no GPU here."),
    ] = None,
    sample_delay_ms: Annotated[
        float, typer.Option(min=0, help="What if every sample took so much longer to read? The profile is left alone.")
    ] = 0.0,
    joint_trials: Annotated[
        int,
        typer.Option(min=0, help="Where no count is enough: trials of workers, prefetching and pinning together."),
    ] = 12,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    study: Annotated[
        Path | None, typer.Option(help="Write the windows as an Optuna study (SQLite), for optuna-dashboard.")
    ] = None,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Find the smallest number of loader workers at the probed micro-batch, and write it into the profile."""
    from autotune.commands.measuring import check_belongs, open_bench, refuse_login_node
    from autotune.decide.fingerprint import compare, compare_for_replay
    from autotune.search.profiles import probed_here, read_profile, report_directory
    from autotune.search.site import local_ranks
    from autotune.search.workers import SweepRequest
    from autotune.show.workers import workers_text
    from trainer.dataset import read_manifest

    stored = read_profile(profile)
    probe = probed_here(stored, refusals=[])
    train = stored.profile.train
    job = _job(stored, ranks or probe.local_ranks, reports, minutes, trial_timeout, on_gpus=consumer_step_ms is None)
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    data_dir = data or profile.parent / (train.data.path or ".")
    manifest = read_manifest(data_dir)
    replayed_s = None if consumer_step_ms is None else consumer_step_ms / 1e3
    with open_bench("cpu" if replayed_s else train.device, data_dir, without_gpu=_replay(stored, probe)) as bench:
        fingerprint = bench.fingerprint(train.model, manifest)
        check_belongs(stored, fingerprint, compare if replayed_s is None else compare_for_replay)
        together = ranks or probe.local_ranks
        together = together if replayed_s is not None else local_ranks(bench.site, together)
        config = train if replayed_s is None else train.model_copy(update={"device": "cpu"})
        request = SweepRequest(
            config=config,
            data_dir=str(data_dir.resolve()),
            limits=bench.loader_limits(config, manifest, together, max_workers),
            window_s=window_s,
            budget_s=60 * minutes,
            trial_timeout_s=trial_timeout,
            replayed_step_s=replayed_s,
            sample_delay_s=sample_delay_ms / 1e3,
            page_cache="as_is" if page_cache == "as-is" else page_cache,
            storage=_storage(bench, data_dir),
        )
        if warning := request.limits.warning():
            sys.stderr.write(f"warn: {warning}\n")
        if page_cache == "warm":
            _warm(data_dir, manifest)
        ledger = report_directory(stored.path, reports) / "ledger"
        sweep, found = _sweep(bench, request, ledger, fingerprint, joint_trials)
    notes = _keep(stored, sweep, found, study)
    print(json.dumps(found.model_dump(), indent=2) if as_json else workers_text(found, profile, data_dir, notes=notes))


def _storage(bench: "Bench", data_dir: Path) -> str:
    """What the dataset lies on: the type of its file system, and which one of them."""
    return f"{bench.site.host.disks[0].filesystem_type}:{data_dir.stat().st_dev}"


def _warm(data_dir: Path, manifest: "Manifest") -> None:
    from autotune.measure.page_cache import fetch
    from trainer.dataset import TokenDataset
    from trainer.progress import progress

    dataset = TokenDataset(data_dir, manifest)
    with progress("reading the dataset into memory") as update:
        fetch(dataset.files, lambda done, total: update(done, total, ""))
    dataset.close()


def _replay(stored: "StoredProfile", probe: "ProbeEvidence") -> str:
    """How to go on where the profile's GPU is not here."""
    rows = stored.profile.train.micro_batch_rows
    step_s = next((point.step_s for point in probe.curve if point.rows == rows), None)
    told = "T" if step_s is None else f"{1e3 * step_s:.4g}"
    return (
        "Run it where the profile was probed; or, on a node with the same CPU and disk, replay the step that the probe "
        f"measured: autotune workers --profile {stored.path} --consumer-step-ms {told}"
    )


def _job(
    stored: "StoredProfile", ranks: int, reports: Path, minutes: float, trial_timeout_s: float, *, on_gpus: bool
) -> JobRequest:
    from autotune.search.profiles import report_directory

    model = stored.profile.train.model.name
    return JobRequest(
        name=f"workers-{model}",
        purpose=f"Counts the loader workers that {model} needs, and writes them into {stored.path}.",
        ledger=str(report_directory(stored.path, reports) / "ledger"),
        expected_minutes=minutes + 1,
        trial_timeout_s=trial_timeout_s,
        ranks=ranks,
        on_gpus=on_gpus and stored.profile.train.device == "cuda",
        cpus=stored.profile.fingerprint.allotted_cpus,
        reports=reports,
    )


def _sweep(
    bench: "Bench", request: "SweepRequest", ledger: Path, here: "Fingerprint", joint_trials: int
) -> "tuple[Sweep, WorkersEvidence]":
    from autotune.search.gpu_source import gpu_source
    from autotune.search.joint import gap_remains, search_joint
    from autotune.search.workers import Sweep, evidence
    from trainer.progress import progress

    with progress(f"workers {request.config.model.name}") as update:
        sweep = Sweep(request=request, runner=bench.runner(ledger, here, update, expected_trials=24))
        choice = sweep.run()
        joint = None
        if joint_trials and gap_remains(choice) and not sweep.time_is_over:
            joint = search_joint(sweep, choice, joint_trials)
        found = evidence(
            sweep,
            choice,
            gpu_source=gpu_source(bench.site, sweep.every, replayed=request.replayed_step_s is not None),
            disk=bench.site.host.disks[0],
        )
    return sweep, found.model_copy(update={"joint": joint})


def _keep(stored: "StoredProfile", sweep: "Sweep", found: "WorkersEvidence", study: Path | None) -> tuple[str, ...]:
    """Write what is to be written; what people should know of it."""
    from autotune.core.profile import profile_to_toml
    from autotune.search.profiles import with_workers
    from autotune.search.study import export_study
    from autotune.store import write_atomically

    notes = []
    if sweep.request.sample_delay_s:
        notes.append("a what-if: the profile was left as it was")
    else:
        write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, sweep.runner)))
    if study is not None:
        export_study(
            sweep.runner.finished, sweep.max_workers, pinning=sweep.request.config.device == "cuda", path=study
        )
        notes.append(f"Optuna study: {study} (look at it with: optuna-dashboard sqlite:///{study})")
    return tuple(notes)
