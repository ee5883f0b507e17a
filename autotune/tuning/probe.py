"""The probe stage: the largest micro-batch of each model under a memory budget, as a profile."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from autotune.core.cards import RESERVE_BYTES, Card
from autotune.core.defaults import HEADROOM_SHARE, MAX_ROWS, SEQ_LENGTH_TOKENS, TRIAL_TIMEOUT_S
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial
from autotune.core.units import format_bytes
from autotune.decide.choose import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    deal,
    default_layout,
    default_precision,
    global_batch_rows,
)
from autotune.decide.surroundings import expected_on_cpu, expected_on_gpu
from autotune.search.estimate import MemoryEstimate
from autotune.search.probe import ProbeRequest, probe_model
from autotune.search.profiles import (
    profile_of_probe,
    profile_paths,
    relative_data_path,
    report_directory,
    with_workers_of,
    write_profile,
)
from autotune.search.site import local_ranks, memory_budget
from autotune.show.probe import ProbedModel
from autotune.store import check_writable
from autotune.tuning.bench import Bench
from trainer.batch import RowStatistics, row_statistics
from trainer.config import Attention, Checkpointing, Layout, ModelSettings, Precision, Strategy, TrainConfig
from trainer.dataset import Manifest, TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAsked:
    """What is to be probed, as people ask for it; None takes what suits the site."""

    models: tuple[ModelSettings, ...]
    data: Path
    out: Path | None
    """Profile file; with several models a directory."""
    reports: Path
    memory_bytes: int | None = None
    as_card: Card | None = None
    """Measure with the memory of a smaller card."""
    seq_length_tokens: int = SEQ_LENGTH_TOKENS
    layout: Layout | None = None
    attention: Attention = "auto"
    attention_dropout: float | None = None
    precision: Precision | None = None
    checkpointing: Checkpointing = "none"
    compile_layers: bool = False
    strategy: Strategy = "ddp"
    global_batch_tokens: int | None = None
    ranks: int | None = None
    accumulate: bool = True
    granularity_rows: int = 1
    headroom_share: float = HEADROOM_SHARE
    max_rows: int = MAX_ROWS
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    traced: bool = True
    """Whether memory is predicted first; otherwise trials alone show the way."""


class Places(NamedTuple):
    """Where things lie."""

    data: Path
    profile: Path
    reports: Path


def probe_models(bench: Bench, asked: ProbeAsked, manifest: Manifest) -> list[ProbedModel]:
    """Probe each model, and write its profile before the next one is probed.

    Raises:
        BadInput, UsageError: If what is asked for cannot be had here.
        DoesNotFit: If not even the smallest size of a model fits.
        Undecided: If trials failed in a way that says nothing about memory.
    """
    paths = profile_paths(asked.out, [settings.name for settings in asked.models], bench.site.name)
    probed = []
    for settings, path in zip(asked.models, paths, strict=True):
        places = Places(asked.data, path, asked.reports)
        probed.append(probe_one(bench, prepare(bench, asked, settings, manifest), places))
    return probed


def probe_request(bench: Bench, asked: ProbeAsked, settings: ModelSettings, manifest: Manifest) -> ProbeRequest:
    """What is to be probed of one model here."""
    site = bench.site
    together = local_ranks(site, asked.ranks)
    expected = (
        expected_on_cpu()
        if site.gpu is None
        else expected_on_gpu(site.gpu.compute_capability, together, site.cuda_bytes)
    )
    return ProbeRequest(
        settings=settings,
        manifest=manifest,
        seq_length_tokens=asked.seq_length_tokens,
        layout=asked.layout or default_layout(settings),
        attention=asked.attention,
        attention_dropout=asked.attention_dropout,
        precision=asked.precision or default_precision(site.device),
        device=site.device,
        memory_budget_bytes=memory_budget(site, asked.memory_bytes, asked.as_card, ranks=together),
        headroom_share=asked.headroom_share,
        max_rows=asked.max_rows,
        trial_timeout_s=asked.trial_timeout_s,
        device_used_before_bytes=bench.used_before(together),
        checkpointing=asked.checkpointing,
        compile_layers=asked.compile_layers,
        strategy=asked.strategy,
        local_ranks=together,
        micro_batches=2 if asked.accumulate else 1,
        granularity_rows=asked.granularity_rows,
        expected=expected if asked.traced else None,
    )


def rows_of(request: ProbeRequest, data: Path) -> RowStatistics:
    """What rows of the dataset hold, as the trainer will lay them out."""
    laid_out = TrainConfig(model=request.settings, seq_length_tokens=request.seq_length_tokens, layout=request.layout)
    return row_statistics(laid_out, TokenDataset(data, request.manifest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A probe that is ready to begin."""

    request: ProbeRequest
    rows: RowStatistics
    global_batch_tokens: int


def prepare(bench: Bench, asked: ProbeAsked, settings: ModelSettings, manifest: Manifest) -> Prepared:
    """Look at the dataset, and settle on the global batch, before hours are spent.

    Raises:
        BadInput: If the global batch has fewer rows than there are ranks.
    """
    request = probe_request(bench, asked, settings, manifest)
    rows = rows_of(request, asked.data)
    tokens = asked.global_batch_tokens or DEFAULT_GLOBAL_BATCH_TOKENS
    global_rows = global_batch_rows(tokens, rows.mean_real_tokens)
    deal(global_rows, 1, request.local_ranks)
    documents = rows.most_documents if request.layout == "packed" else 1.0
    request = replace(request, documents_per_row=documents, global_batch_rows=global_rows)
    left = f" ({format_bytes(RESERVE_BYTES)} of the GPU are left free; --memory sets the budget)"
    sys.stderr.write(
        f"{settings.name}: memory budget {format_bytes(request.memory_budget_bytes)} per rank"
        f"{left if bench.site.gpu is not None and asked.memory_bytes is None else ''}\n"
    )
    return Prepared(request=request, rows=rows, global_batch_tokens=tokens)


def probe_one(
    bench: Bench,
    ready: Prepared,
    places: Places,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
) -> ProbedModel:
    """Probe one model and write its profile.

    Raises:
        OutOfTime: If time is over, in seconds since 1970, before the largest micro-batch is proven.
    """
    check_writable(places.profile.parent)
    profile, trials = probed_profile(bench, ready, places, traced, budget_ends_s)
    profile = with_workers_of(profile, places.profile)
    kept = write_profile(places.profile, profile)
    return ProbedModel(path=places.profile, profile=profile, trials=trials, previous=kept)


def probed_profile(
    bench: Bench,
    ready: Prepared,
    places: Places,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
) -> tuple[Profile, tuple[FinishedTrial, ...]]:
    """Probe one model; the profile that this alone supports, which is not written, and its trials."""
    request, manifest = ready.request, ready.request.manifest
    here = bench.fingerprint(request.settings, manifest)
    with bench.display.show(f"probe {request.settings.name}") as update:
        runner = bench.runner(
            report_directory(places.profile, places.reports) / "ledger", here, update, 12, budget_ends_s
        )
        result = probe_model(request, runner, traced)
    profile = profile_of_probe(
        request,
        result,
        runner,
        here=here,
        global_batch_tokens=ready.global_batch_tokens,
        mean_real_tokens_per_row=ready.rows.mean_real_tokens,
        data_path=relative_data_path(places.data, places.profile),
        slurm_job_id=bench.site.slurm.job_id,
    )
    return profile, tuple(runner.finished)
