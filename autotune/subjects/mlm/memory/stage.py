"""Probe phase of tuning: the largest micro-batch of each model, as a profile.

A model's settings are completed with the defaults of the site before any trial, and its
profile is written before the next model is probed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.machine.measured_device import MeasuredDevice
from autotune.memory.stage import overheads_range, probe_one, tell_budget
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.default_settings import default_layout, default_precision
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import WrittenProfile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.probe import Probe, ProbeRequest
from autotune.subjects.mlm.subject import MlmSubject
from trainer.config.compilers import missing_for_compile
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import sequence_statistics
from trainer.formats.manifest import read_manifest
from trainer.formats.tables import parse_table
from trainer.formats.train_config import ModelSettings, TrainConfig


def requested_config(model: ModelSettings, **settings: Any) -> TrainConfig:
    """Return settings of a step, of which only the requested ones count as set.

    Args:
        model: The model.
        settings: Settings by name; None is replaced by the site's default later.

    Raises:
        BadConfig: If a setting is unknown or invalid.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return parse_table(TrainConfig, {"model": model, **given}, where="the options")


def requested_subject(request: ProbeRequest) -> MlmSubject:
    """Return the trainer with the requested settings, on its dataset.

    Raises:
        BadConfig: If there is no dataset.
    """
    return MlmSubject.of_dataset(request.config, read_manifest(request.data))


def probe_models(
    bench: SubjectBench,
    requests: Sequence[ProbeRequest],
    out: Path | None,
    budget_ends_s: float | None = None,
) -> list[WrittenProfile]:
    """Probe each model, and write its profile before the next one is probed.

    Args:
        bench: Machine that runs the trials.
        requests: One for each model.
        out: File or directory of the profiles; None for the default.
        budget_ends_s: Time after which no trial begins, in seconds since 1970; None
            without a limit.

    Raises:
        OutOfTime: If the time is up before a size of every model ran.
        ExceedsMemory: If not even one sequence of a model fits.
        Undecided: If trials failed for another reason than memory.
    """
    names = [request.config.model.name for request in requests]
    paths = profile_paths(out, names, bench.site.name)
    probed = []
    for request, path in zip(requests, paths, strict=True):
        probe = prepare(bench, request)
        subject_bench = replace(bench, subject=probe.subject)
        probed.append(probe_one(subject_bench, probe, path, ends_s=budget_ends_s))
    return probed


def prepare(bench: SubjectBench, request: ProbeRequest) -> Probe:
    """Complete the settings of a probe, and report its memory budget on stderr.

    A sample of the dataset gives the tokens of a sequence, and these the number of
    sequences in the global batch.

    Raises:
        BadInput: If the global batch is too small for the ranks, or the device has too
            little memory or too few GPUs.
    """
    probe = settled_probe(bench, request)
    sequence_stats = sequence_statistics(
        probe.config, TokenDataset(request.data, probe.manifest)
    )
    tokens = request.config.global_batch_tokens or DEFAULT_GLOBAL_BATCH_TOKENS
    global_batch_size = global_batch_size_of(
        tokens, sequence_stats.mean_non_padding_tokens
    )
    # Raises an error now if the global batch is too small for the ranks.
    split_global_batch(global_batch_size, 1, probe.local_ranks)
    tell_budget(bench.site, probe, probe.config.model.name)
    config = probe.config.model_copy(update={"global_batch_size": global_batch_size})
    return replace(
        probe,
        config=config,
        global_batch_tokens=tokens,
        sequence_stats=sequence_stats,
    )


def settled_probe(bench: SubjectBench, request: ProbeRequest) -> Probe:
    """Return a probe with the site's defaults, but without the dataset's statistics.

    Raises:
        BadInput: If the device has too little memory or too few GPUs.
    """
    site = bench.site
    ranks, budget_bytes = request.on(site)
    overheads = None
    if request.traced:
        overheads = overheads_range(site, ranks)
    return Probe(
        limits=request,
        config=_settled_config(request.config, site),
        manifest=read_manifest(request.data),
        memory_budget_bytes=budget_bytes,
        device_used_before_bytes=bench.used_before_bytes(ranks),
        local_ranks=ranks,
        overheads=overheads,
    )


def _settled_config(config: TrainConfig, site: MeasuredDevice) -> TrainConfig:
    """Return the settings, with the site's default for each that is not set.

    The global batch in tokens is left out, as the probe has it in sequences.
    """
    settled: dict[str, Any] = {"device": site.device, "global_batch_tokens": None}
    if "layout" not in config.model_fields_set:
        settled["layout"] = default_layout(config.model)
    if "precision" not in config.model_fields_set:
        settled["precision"] = default_precision(site.device)
    if config.compile is None:
        can_compile = site.device == "cuda" and missing_for_compile("cuda") is None
        settled["compile"] = can_compile
    return config.model_copy(update=settled)
