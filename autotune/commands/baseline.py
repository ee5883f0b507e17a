"""``autotune baseline``: what the tuned settings are worth, against the defaults and the paper's style."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, TRIAL_TIMEOUT_S, AsJson, Here, ProfileData, Reports, TrialTimeout

if TYPE_CHECKING:
    from autotune.commands.measuring import Bench
    from autotune.core.evidence import BaselineEvidence
    from autotune.core.profile import Fingerprint
    from autotune.search.baseline import BaselineRequest
    from autotune.search.profiles import StoredProfile
    from autotune.search.workers import SweepRequest


def baseline(
    context: typer.Context,
    *,
    profile: Annotated[Path, typer.Option(help="A profile that autotune probe wrote on this machine.")],
    data: ProfileData = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that train together. Default: as the profile was probed.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Windows of each at most; fewer where ratios are known to 5 %.")
    ] = 10,
    window_s: Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")] = 2.0,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time after which no round begins any more; three are always measured.")
    ] = 5.0,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Train for some windows as tuned, by default and in the paper's style, and write what that is worth."""
    from autotune.commands.measuring import check_belongs, open_bench, refuse_login_node
    from autotune.search.profiles import probed_here, read_profile, report_directory
    from autotune.search.site import local_ranks
    from autotune.search.workers import SweepRequest
    from autotune.show.baseline import baseline_text
    from trainer.dataset import read_manifest

    stored = read_profile(profile)
    probe = probed_here(stored, refusals=[])
    train = stored.profile.train
    ledger = report_directory(stored.path, reports) / "ledger"
    job = JobRequest(
        name=f"baseline-{train.model.name}",
        purpose=f"Measures what the tuned settings of {train.model.name} are worth, and writes it into {stored.path}.",
        ledger=str(ledger),
        expected_minutes=minutes + 1,
        trial_timeout_s=trial_timeout,
        ranks=ranks or probe.local_ranks,
        on_gpus=train.device == "cuda",
        cpus=stored.profile.fingerprint.allotted_cpus,
        reports=reports,
    )
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    data_dir = data or profile.parent / (train.data.path or ".")
    manifest = read_manifest(data_dir)
    with open_bench(train.device, data_dir) as bench:
        fingerprint = bench.fingerprint(train.model, manifest)
        check_belongs(stored, fingerprint)
        together = local_ranks(bench.site, ranks or probe.local_ranks)
        windows = SweepRequest(
            config=train,
            data_dir=str(data_dir.resolve()),
            limits=bench.loader_limits(train, manifest, together, None),
            window_s=window_s,
            budget_s=60 * minutes,
            trial_timeout_s=trial_timeout,
            storage=f"{bench.site.host.disks[0].filesystem_type}:{data_dir.stat().st_dev}",
        )
        request = _request(bench, stored, windows, data_dir, rounds)
        found = _compare(bench, request, stored, fingerprint, ledger)
    print(json.dumps(found.model_dump(), indent=2) if as_json else baseline_text(found, profile))


def _request(
    bench: "Bench", stored: "StoredProfile", windows: "SweepRequest", data_dir: Path, rounds: int
) -> "BaselineRequest":
    from autotune.search.baseline import BaselineRequest, compare_with
    from trainer.dataset import TokenDataset

    probe = stored.profile.evidence.probe
    assert probe is not None
    with contextlib.closing(TokenDataset.open(data_dir)) as dataset:
        others, real_shares = compare_with(windows.config, dataset, *windows.limits.most())
        manifest = dataset.manifest
    used = [one for one in bench.site.used_bytes_by_gpu[: windows.limits.local_ranks] if one is not None]
    return BaselineRequest(
        windows=windows,
        others=others,
        rounds=rounds,
        memory_budget_bytes=stored.profile.constraints.memory_budget_bytes,
        micro_batches=probe.micro_batches_per_step,
        device_used_before_bytes=used if len(used) == windows.limits.local_ranks else None,
        real_shares=real_shares,
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids.model_dump(),
    )


def _compare(
    bench: "Bench", request: "BaselineRequest", stored: "StoredProfile", here: "Fingerprint", ledger: Path
) -> "BaselineEvidence":
    """Measure, and write what was found into the profile."""
    from autotune.core.profile import profile_to_toml
    from autotune.search.baseline import Comparison
    from autotune.search.profiles import with_baseline
    from autotune.store import write_atomically
    from trainer.progress import progress

    with progress(f"baseline {request.windows.config.model.name}") as update:
        trials = len(request.others) + (len(request.others) + 1) * request.rounds
        runner = bench.runner(ledger, here, update, expected_trials=trials)
        found = Comparison(request=request, runner=runner).run()
    write_atomically(stored.path, profile_to_toml(with_baseline(stored.profile, found, runner)))
    return found
