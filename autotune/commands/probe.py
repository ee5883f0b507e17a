"""``autotune probe``: the largest micro-batch per model under a memory budget, and the throughput curve."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.errors import BadInput, UsageError

if TYPE_CHECKING:
    from autotune.commands.measuring import Bench
    from autotune.search.probe import ProbeRequest
    from autotune.show.probe import ProbedModel


def probe(
    *,
    model: Annotated[list[str], typer.Option(help="Preset or config.json; repeat for several models.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.", envvar="AUTOTUNE_DATA")],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(help="Budget of one rank, such as 94GB or 2GiB. Default: the free GPU memory; half the RAM."),
    ] = None,
    seq_length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = 512,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32. Default: bf16 on GPUs.")] = None,
    global_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Real tokens of an optimizer step over all ranks. Default: those of 256 rows."),
    ] = None,
    headroom: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the largest micro-batch left free.")] = 0.03,
    max_rows: Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")] = 16384,
    trial_timeout: Annotated[float, typer.Option(min=1, help="Seconds that one trial may take.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Profile file; with several models a directory.")] = None,
    reports: Annotated[Path, typer.Option(help="Where ledgers and reports lie.")] = Path("reports"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the largest micro-batch that fits, prove that one more does not, and measure throughput below it."""
    from autotune.commands.measuring import open_bench
    from autotune.core.units import parse_bytes
    from autotune.search.probe import ProbeRequest
    from autotune.search.site import memory_budget
    from autotune.show.probe import probe_json, probe_text
    from trainer.dataset import read_manifest
    from trainer.presets import model_settings

    _one_of("--device", device, ("auto", "cuda", "cpu"))
    if precision is not None:
        _one_of("--precision", precision, ("bf16", "fp32"))
    try:
        asked_bytes = parse_bytes(memory) if memory is not None else None
    except ValueError as error:
        raise BadInput(str(error), next_step="Try --memory 2GiB.") from error
    every_settings = [model_settings(name) for name in model]
    manifest = read_manifest(data)
    with open_bench(device, data) as bench:  # type: ignore[arg-type]  # checked above
        budget_bytes = memory_budget(bench.site, asked_bytes)
        paths = _profile_paths(out, [settings.name for settings in every_settings], bench.site.name)
        probed = [
            _probe_one(
                bench,
                ProbeRequest(
                    settings=settings,
                    manifest=manifest,
                    seq_length_tokens=seq_length,
                    precision=precision or ("bf16" if bench.site.device == "cuda" else "fp32"),  # type: ignore[arg-type]
                    device=bench.site.device,
                    memory_budget_bytes=budget_bytes,
                    headroom_share=headroom,
                    max_rows=max_rows,
                    trial_timeout_s=trial_timeout,
                    device_used_before_bytes=bench.site.device_used_bytes,
                ),
                data=data,
                path=path,
                reports=reports,
                global_batch_tokens=global_batch_tokens,
            )
            for settings, path in zip(every_settings, paths, strict=True)
        ]
    print(json.dumps(probe_json(probed), indent=2) if as_json else probe_text(probed, data))


def _probe_one(
    bench: "Bench",
    request: "ProbeRequest",
    *,
    data: Path,
    path: Path,
    reports: Path,
    global_batch_tokens: int | None,
) -> "ProbedModel":
    from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, LengthDistribution
    from autotune.decide.choose import DEFAULT_GLOBAL_BATCH_ROWS, choose_micro_batch
    from autotune.search.probe import probe_model
    from autotune.search.profiles import (
        profile_of_probe,
        relative_data_path,
        report_directory,
        with_workers_of,
        write_profile,
    )
    from autotune.show.probe import ProbedModel
    from autotune.store import check_writable
    from trainer.progress import progress

    check_writable(path.parent)
    here = bench.fingerprint(request.settings, request.manifest)
    with progress(f"probe {request.settings.name}") as update:
        runner = bench.runner(report_directory(path, reports) / "ledger", here, update, expected_trials=12)
        result = probe_model(request, runner)
    choice = choose_micro_batch(result.curve, result.feasible_max, request.headroom_share)
    histogram = request.manifest.length_histogram
    body = LengthDistribution(edges=histogram.edges, counts=histogram.counts).mean_tokens(
        truncated_at=request.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    )
    mean_tokens = (body or 0) + SPECIAL_TOKENS_PER_SAMPLE
    profile = profile_of_probe(
        request,
        result,
        choice,
        runner,
        here=here,
        global_batch_tokens=global_batch_tokens or round(DEFAULT_GLOBAL_BATCH_ROWS * mean_tokens),
        mean_real_tokens_per_row=mean_tokens,
        data_path=relative_data_path(data, path),
        slurm_job_id=bench.site.slurm.job_id,
    )
    profile = with_workers_of(profile, path)
    kept = write_profile(path, profile)
    return ProbedModel(path=path, profile=profile, trials=tuple(runner.finished), previous=kept)


def _profile_paths(out: Path | None, names: list[str], device_name: str) -> list[Path]:
    if len(set(names)) < len(names):
        raise UsageError(
            "two models have the same name", next_step="Probe them one at a time, each with its own --out."
        )
    if out is not None and len(names) == 1 and out.suffix == ".toml":
        return [out]
    if out is not None and (out.suffix == ".toml" or out.is_file()):
        raise UsageError(
            f"--out {out} names one file for {len(names)} models"
            if len(names) > 1
            else f"--out {out} is not a .toml file",
            next_step="Name a directory, or a .toml file for a single model.",
        )
    return [(out or Path("profiles")) / f"{name}-{device_name}.toml" for name in names]


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value!r} is none of {', '.join(allowed)}", next_step=f"Try {option} {allowed[0]}.")
