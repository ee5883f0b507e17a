"""``autotune probe``: the largest micro-batch per model under a memory budget, and the throughput curve."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, TRIAL_TIMEOUT_S, AsJson, Here, Reports, TrialTimeout
from autotune.errors import BadInput, UsageError

if TYPE_CHECKING:
    from autotune.commands.measuring import Bench
    from autotune.search.probe import ProbeRequest
    from autotune.show.probe import ProbedModel


_MINUTES_PER_MODEL = 3
"""What a probe takes in the mean: ten to twenty trials, most of which end in seconds."""


def probe(
    context: typer.Context,
    *,
    model: Annotated[list[str], typer.Option(help="Preset or config.json; repeat for several models.")],
    data: Annotated[Path, typer.Option(help="Dataset directory.", envvar="AUTOTUNE_DATA")],
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="What to measure; auto takes the first visible GPU, else the CPU."),
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(help="Budget of one rank, such as 94GB or 2GiB. Default: the free GPU memory; half the RAM."),
    ] = None,
    seq_length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = 512,
    layout: Annotated[
        Literal["packed", "bucketed", "padded"] | None,
        typer.Option(help="What a row holds. Default: packed, where this project knows the model's attention."),
    ] = None,
    attention_dropout: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Instead of the model's: 0 lets GPUs use their fastest kernels."),
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Of the matrix products. Default: bf16 on GPUs, fp32 on CPUs."),
    ] = None,
    global_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Real tokens of an optimizer step over all ranks. Default: those of 256 samples."),
    ] = None,
    checkpointing: Annotated[
        Literal["none", "selective", "full"], typer.Option(help="Which activations are computed again in backward.")
    ] = "none",
    as_gpu: Annotated[
        str | None, typer.Option(help="Measure with the memory of a smaller card, such as h100-nvl-94gb.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that step together. Default: all visible GPUs; 1 on a CPU.")
    ] = None,
    accumulate: Annotated[
        bool, typer.Option(help="Let steps have several micro-batches, which needs more memory than one.")
    ] = True,
    granularity: Annotated[int, typer.Option(min=1, help="Try multiples of this many rows only.")] = 1,
    headroom: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the largest micro-batch left free.")] = 0.03,
    max_rows: Annotated[int, typer.Option(min=1, help="Try no larger micro-batch.")] = 16384,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    out: Annotated[Path | None, typer.Option(help="Profile file; with several models a directory.")] = None,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Find the largest micro-batch that fits, prove that one more does not, and measure throughput below it."""
    from autotune.commands.measuring import open_bench, refuse_login_node
    from autotune.core.cards import find_card
    from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
    from autotune.search.probe import ProbeRequest
    from autotune.search.site import local_ranks, memory_budget
    from autotune.show.probe import probe_json, probe_text
    from trainer.dataset import read_manifest
    from trainer.families import FAMILIES
    from trainer.presets import model_settings

    if granularity > max_rows:
        raise UsageError(
            f"--granularity {granularity} leaves nothing to try up to --max-rows {max_rows}",
            next_step=f"Use --max-rows {granularity} or more.",
        )
    asked_bytes = None if memory is None else _size(memory)
    as_card = None if as_gpu is None else find_card(as_gpu)
    every_settings = [model_settings(name) for name in model]
    manifest = read_manifest(data)
    job = _job(
        [settings.name for settings in every_settings], out, reports, trial_timeout, ranks, on_gpus=device != "cpu"
    )
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    with open_bench(device, data) as bench:
        site = bench.site
        together = local_ranks(site, ranks)
        budget_bytes = memory_budget(site, asked_bytes, as_card, ranks=together)
        expected = expected_on_cpu() if site.gpu is None else expected_on_gpu(site.gpu.compute_capability, together)
        paths = _profile_paths(out, [settings.name for settings in every_settings], site.name)
        probed = []
        for settings, path in zip(every_settings, paths, strict=True):
            request = ProbeRequest(
                settings=settings,
                manifest=manifest,
                seq_length_tokens=seq_length,
                layout=layout or ("packed" if settings.config["model_type"] in FAMILIES else "padded"),
                attention_dropout=attention_dropout,
                precision=precision or ("bf16" if site.device == "cuda" else "fp32"),
                device=site.device,
                memory_budget_bytes=budget_bytes,
                headroom_share=headroom,
                max_rows=max_rows,
                trial_timeout_s=trial_timeout,
                device_used_before_bytes=_used_before(site.used_bytes_by_gpu[:together]),
                checkpointing=checkpointing,
                local_ranks=together,
                micro_batches=2 if accumulate else 1,
                granularity_rows=granularity,
                expected=expected,
            )
            probed.append(_probe_one(bench, request, _Places(data, path, reports), global_batch_tokens))
    print(json.dumps(probe_json(probed), indent=2) if as_json else probe_text(probed, data))


def _job(
    models: list[str], out: Path | None, reports: Path, trial_timeout_s: float, ranks: int | None, *, on_gpus: bool
) -> JobRequest:
    one = out.stem if out is not None and out.suffix == ".toml" else None
    return JobRequest(
        name=f"probe-{models[0]}" if len(models) == 1 else "probe",
        purpose=f"Finds the largest micro-batch of {', '.join(models)}, and writes profiles.",
        ledger=", ".join(str(reports / (one or f"{model}-*") / "ledger") for model in models),
        expected_minutes=1 + _MINUTES_PER_MODEL * len(models),
        trial_timeout_s=trial_timeout_s,
        ranks=ranks,
        on_gpus=on_gpus,
        reports=reports,
    )


class _Places(NamedTuple):
    data: Path
    profile: Path
    reports: Path


def _probe_one(
    bench: "Bench",
    request: "ProbeRequest",
    places: _Places,
    global_batch_tokens: int | None,
) -> "ProbedModel":
    from autotune.decide.choose import DEFAULT_GLOBAL_BATCH_SAMPLES, choose_micro_batch, deal, global_batch_rows
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
    from trainer.batch import row_statistics
    from trainer.config import TrainConfig
    from trainer.dataset import TokenDataset
    from trainer.progress import progress

    check_writable(places.profile.parent)
    here = bench.fingerprint(request.settings, request.manifest)
    # As the trainer will lay rows out.
    laid_out = TrainConfig(model=request.settings, seq_length_tokens=request.seq_length_tokens, layout=request.layout)
    rows = row_statistics(laid_out, TokenDataset(places.data, request.manifest))
    tokens = global_batch_tokens or round(DEFAULT_GLOBAL_BATCH_SAMPLES * rows.mean_real_tokens / rows.mean_samples)
    deal(global_batch_rows(tokens, rows.mean_real_tokens), 1, request.local_ranks)  # before hours are spent
    request = replace(request, documents_per_row=rows.most_documents if request.layout == "packed" else 1.0)
    with progress(f"probe {request.settings.name}") as update:
        runner = bench.runner(
            report_directory(places.profile, places.reports) / "ledger", here, update, expected_trials=12
        )
        result = probe_model(request, runner)
    choice = choose_micro_batch(result.curve, result.feasible_max)
    profile = profile_of_probe(
        request,
        result,
        choice,
        runner,
        here=here,
        global_batch_tokens=tokens,
        mean_real_tokens_per_row=rows.mean_real_tokens,
        data_path=relative_data_path(places.data, places.profile),
        slurm_job_id=bench.site.slurm.job_id,
    )
    profile = with_workers_of(profile, places.profile)
    kept = write_profile(places.profile, profile)
    return ProbedModel(path=places.profile, profile=profile, trials=tuple(runner.finished), previous=kept)


def _used_before(used: tuple[int | None, ...]) -> int | list[int] | None:
    """What each GPU held before, where all of them say."""
    known = [one for one in used if one is not None]
    return known if known and len(known) == len(used) else None


def _size(text: str) -> int:
    from autotune.core.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInput(str(error), next_step="Try --memory 2GiB.") from error


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
