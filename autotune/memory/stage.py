"""Probe phase of tuning: the largest micro-batch of each model under a memory budget, as a profile."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.base.files import check_writable
from autotune.base.units import format_bytes
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.machine.measured_device import MeasuredDevice, local_ranks, memory_budget
from autotune.memory.decide.memory_model import expected_on_cpu, expected_on_gpu
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.measure import Probe, ProbeRequest, probe_model
from autotune.memory.sections import ProbedModel
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    default_layout,
    default_precision,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.store import (
    keep_workers,
    profile_paths,
    relative_data_path,
    trial_log_provenance,
    write_profile,
)
from autotune.profiles.values import Constraints, Evidence, Profile, Provenance
from autotune.trials.session import Session
from autotune.trials.trial_log import report_directory
from autotune.trials.values import FinishedTrial
from trainer.config.resolve import missing_for_compile
from trainer.config.tables import parse_table
from trainer.config.train_config import DataSettings, ModelSettings, TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import sequence_statistics
from trainer.health.events import utc_now


def requested_config(model: ModelSettings, **settings: Any) -> TrainConfig:
    """Return settings of a step in which only the requested ones are set.

    None leaves one unset.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return parse_table(TrainConfig, {"model": model, **given}, where="the options")


def check_budgets(requests: Sequence[ProbeRequest], site: MeasuredDevice) -> None:
    """Raise ``BadInput`` if the device has less memory, or fewer GPUs, than requested."""
    for one in requests:
        memory_budget(
            site, one.memory_bytes, one.as_gpu, ranks=local_ranks(site, one.ranks)
        )


def probe_models(
    bench: Session,
    requests: Sequence[ProbeRequest],
    out: Path | None,
    ends_s: float | None = None,
) -> list[ProbedModel]:
    """Probe each model, and write its profile, to the file or directory ``out``, before the next one is probed."""
    paths = profile_paths(
        out, [request.config.model.name for request in requests], bench.site.name
    )
    pairs = zip(requests, paths, strict=True)
    return [
        probe_one(bench, prepare(bench, request), path, budget_ends_s=ends_s)
        for request, path in pairs
    ]


def prepare(bench: Session, request: ProbeRequest) -> Probe:
    """Complete the settings, read the dataset's statistics, and set the global batch, before any trial."""
    probe = settled_probe(bench, request)
    rows = sequence_statistics(probe.config, TokenDataset(request.data, bench.manifest))
    tokens = request.config.global_batch_tokens or DEFAULT_GLOBAL_BATCH_TOKENS
    global_batch_size = global_batch_size_of(tokens, rows.mean_non_padding_tokens)
    split_global_batch(global_batch_size, 1, probe.local_ranks)
    left = (
        f" ({format_bytes(RESERVE_BYTES)} of the GPU stay free; change the budget with"
        " --memory)"
    )
    sys.stderr.write(
        f"{probe.config.model.name}: memory budget"
        f" {format_bytes(probe.memory_budget_bytes)} per rank"
        f"{left if bench.site.gpu is not None and request.memory_bytes is None else ''}\n"
    )
    config = probe.config.model_copy(update={"global_batch_size": global_batch_size})
    return replace(probe, config=config, global_batch_tokens=tokens, rows=rows)


def settled_probe(bench: Session, request: ProbeRequest) -> Probe:
    """Return a probe completed with the defaults of this site, without statistics of the dataset."""
    site, gpu, config = bench.site, bench.site.gpu, request.config
    together = local_ranks(site, request.ranks)
    expected = (
        expected_on_gpu(gpu.compute_capability, together, site.cuda_bytes)
        if gpu
        else expected_on_cpu()
    )
    defaults = {
        "layout": default_layout(config.model),
        "precision": default_precision(site.device),
    }
    settled: dict[str, Any] = {
        name: one
        for name, one in defaults.items()
        if name not in config.model_fields_set
    }
    settled |= {"device": site.device, "global_batch_tokens": None}
    if config.compile is None:
        settled["compile"] = (
            site.device == "cuda" and missing_for_compile("cuda") is None
        )
    return Probe(
        request=request,
        config=config.model_copy(update=settled),
        manifest=bench.manifest,
        memory_budget_bytes=memory_budget(
            site, request.memory_bytes, request.as_gpu, ranks=together
        ),
        device_used_before_bytes=bench.used_before(together),
        local_ranks=together,
        expected=expected if request.traced else None,
    )


def probe_one(
    bench: Session,
    probe: Probe,
    path: Path,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
) -> ProbedModel:
    """Probe one model and write its profile.

    Raise ``OutOfTime`` after ``budget_ends_s``, in seconds since 1970.
    """
    check_writable(path.parent)
    profile, trials = profile_of_probe(bench, probe, path, traced, budget_ends_s)
    profile = keep_workers(profile, path)
    return ProbedModel(
        path=path, previous=write_profile(path, profile), profile=profile, trials=trials
    )


def profile_of_probe(
    bench: Session,
    probe: Probe,
    path: Path,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
) -> tuple[Profile, tuple[FinishedTrial, ...]]:
    """Probe one model.

    Return its profile, not yet written to ``path``, and the trials.
    """
    model, request = probe.config.model, probe.request
    here = bench.fingerprint(model)
    with bench.display.show(f"probe {model.name}") as update:
        runner = bench.runner(report_directory(path, request.reports), here, update, 12)
        runner.budget_ends_s = budget_ends_s
        train, found = probe_model(probe, runner, traced)
    data = DataSettings(
        path=relative_data_path(request.data, path),
        dataset_hash=bench.manifest.dataset_hash,
    )
    profile = Profile(
        train=train.model_copy(update={"data": data}),
        constraints=Constraints(
            memory_budget_bytes=probe.memory_budget_bytes,
            headroom_share=request.headroom_share,
            global_batch_tokens=probe.global_batch_tokens,
        ),
        fingerprint=here,
        provenance=Provenance(
            tool_version=__version__,
            created_utc=utc_now(),
            commands=["probe"],
            slurm_job_id=bench.site.slurm.job_id,
            **trial_log_provenance(runner, here, train.seq_length_tokens),
        ),
        evidence=Evidence(probe=found),
    )
    return profile, tuple(runner.finished)
