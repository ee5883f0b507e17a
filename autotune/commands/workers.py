"""``autotune workers``: the smallest number of loader processes that does not cost throughput."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autotune.commands.measuring import Bench
    from autotune.core.profile import Fingerprint, WorkersEvidence
    from autotune.search.profiles import StoredProfile
    from autotune.search.workers import SweepRequest


def workers(
    *,
    profile: Annotated[Path, typer.Option(help="A profile that autotune probe wrote on this machine.")],
    data: Annotated[
        Path | None, typer.Option(help="Dataset directory. Default: the profile's.", envvar="AUTOTUNE_DATA")
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option(min=0, help="Try no more loader processes. Default: the CPUs allotted to this process."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Windows per count, interleaved.")] = 3,
    window_s: Annotated[float, typer.Option("--window", min=0.1, help="Seconds of one measured window.")] = 2.0,
    trial_timeout: Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")] = 600.0,
    reports: Annotated[Path, typer.Option(help="Where ledgers and reports lie.")] = Path("reports"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the smallest number of loader workers at the probed micro-batch, and write it into the profile."""
    from autotune.commands.measuring import open_bench
    from autotune.search.profiles import probed_here, read_profile
    from autotune.search.workers import SweepRequest
    from autotune.show.workers import workers_text
    from trainer.dataset import read_manifest

    stored = read_profile(profile)
    probed_here(stored, refusals=[])
    train = stored.profile.train
    data_dir = data or profile.parent / (train.data.path or ".")
    manifest = read_manifest(data_dir)
    with open_bench(train.device, data_dir) as bench:
        here = bench.fingerprint(train.model, manifest)
        probed_here(stored, refusals=_differences(stored, here))
        request = SweepRequest(
            config=train,
            data_dir=str(data_dir.resolve()),
            max_workers=bench.site.host.allotted_cpus if max_workers is None else max_workers,
            repeats=repeats,
            window_s=window_s,
            trial_timeout_s=trial_timeout,
        )
        found = _sweep(bench, request, stored, here, reports)
    print(json.dumps(found.model_dump(), indent=2) if as_json else workers_text(found, profile, data_dir))


def _sweep(
    bench: "Bench", request: "SweepRequest", stored: "StoredProfile", here: "Fingerprint", reports: Path
) -> "WorkersEvidence":
    from autotune.core.profile import profile_to_toml
    from autotune.measure.gpu_sampler import GpuSampler
    from autotune.search.profiles import report_directory, with_workers
    from autotune.search.workers import GpuSeries, ladder, sweep_workers
    from autotune.store import write_atomically
    from trainer.progress import progress

    expected = request.repeats * (1 + len(ladder(request.max_workers)))
    with progress(f"workers {request.config.model.name}") as update:
        ledger = report_directory(stored.path, reports) / "ledger"
        runner = bench.runner(ledger, here, update, expected)
        gpu = bench.site.gpu
        if gpu is None:
            reason = "n/a (CPU run)" if bench.site.gpu_absent is None else f"n/a ({bench.site.gpu_absent})"
            found = sweep_workers(request, runner, GpuSeries(source=reason))
        else:
            sampler = GpuSampler(bench.monitor, [gpu.uuid])
            sampler.start()
            series = GpuSeries(
                source=f"NVML utilisation of {gpu.name}: share of time with a kernel running, which is not MFU",
                samples=lambda: sampler.stop()[gpu.uuid],
            )
            try:
                found = sweep_workers(request, runner, series)
            finally:
                sampler.stop()
    write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, runner)))
    return found


def _differences(stored: "StoredProfile", here: "Fingerprint") -> list[str]:
    """What refuses the profile here; lesser differences are said and do not stop anything."""
    from autotune.decide.fingerprint import compare

    refusals = []
    for mismatch in compare(stored.profile.fingerprint, here):
        text = f"{mismatch.field} was {mismatch.profile}, here it is {mismatch.here}"
        if mismatch.severity == "refuse":
            refusals.append(text)
        else:
            sys.stderr.write(f"{mismatch.severity}: {text}\n")
    if not stored.intact:
        sys.stderr.write(f"inform: {stored.path} was edited by hand since it was written\n")
    return refusals
