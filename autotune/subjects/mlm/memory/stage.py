"""Probe phase of tuning: the largest micro-batch of each model, as a profile.

A model's settings are completed with the defaults of the site before any trial, and its
profile is written before the next model is probed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.base.files import check_writable
from autotune.base.log import LOG
from autotune.base.units import format_bytes
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
    Provenance,
    trainer_subject,
)
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.machine.measured_device import MeasuredDevice, local_ranks, memory_budget
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.measure import probe_subject
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.default_settings import default_layout, default_precision
from autotune.profiles.profile_paths import profile_paths, relative_data_path
from autotune.profiles.recorded_trials import trial_log_provenance
from autotune.profiles.store import keep_workers, write_profile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.probe import Probe, ProbeRequest
from autotune.subjects.mlm.memory.probed_model import ProbedModel
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.trial_log import report_directory
from autotune.trials.values import FinishedTrial
from trainer.config.compilers import missing_for_compile
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import sequence_statistics
from trainer.formats.events import utc_now
from trainer.formats.manifest import read_manifest
from trainer.formats.tables import parse_table
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

_EXPECTED_TRIALS = 12
"""Usual number of trials of a probe, for its progress bar."""


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


def check_budgets(requests: Sequence[ProbeRequest], site: MeasuredDevice) -> None:
    """Check that the device has the memory and the GPUs that are requested.

    Raises:
        BadInput: If it has less memory, or fewer GPUs.
    """
    for request in requests:
        memory_budget(
            site,
            request.memory_bytes,
            request.as_gpu,
            ranks=local_ranks(site, request.ranks),
        )


def probe_models(
    bench: SubjectBench,
    requests: Sequence[ProbeRequest],
    out: Path | None,
    budget_ends_s: float | None = None,
) -> list[ProbedModel]:
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
        probed.append(probe_one(bench, probe, path, budget_ends_s=budget_ends_s))
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
    LOG.info("%s", _budget_words(bench, probe))
    config = probe.config.model_copy(update={"global_batch_size": global_batch_size})
    return replace(
        probe,
        config=config,
        global_batch_tokens=tokens,
        sequence_stats=sequence_stats,
    )


def _budget_words(bench: SubjectBench, probe: Probe) -> str:
    """Return the memory budget in words, and what a default budget leaves free."""
    words = (
        f"{probe.config.model.name}: memory budget"
        f" {format_bytes(probe.memory_budget_bytes)} per rank"
    )
    if bench.site.gpu is not None and probe.request.memory_bytes is None:
        words += (
            f" ({format_bytes(RESERVE_BYTES)} of the GPU stay free; change the budget"
            " with --memory)"
        )
    return words


def settled_probe(bench: SubjectBench, request: ProbeRequest) -> Probe:
    """Return a probe with the site's defaults, but without the dataset's statistics.

    Raises:
        BadInput: If the device has too little memory or too few GPUs.
    """
    site = bench.site
    ranks = local_ranks(site, request.ranks)
    overheads = None
    if request.traced:
        overheads = _overheads_range(site, ranks)
    return Probe(
        request=request,
        config=_settled_config(request.config, site),
        manifest=read_manifest(request.data),
        memory_budget_bytes=memory_budget(
            site, request.memory_bytes, request.as_gpu, ranks=ranks
        ),
        device_used_before_bytes=bench.used_before_bytes(ranks),
        local_ranks=ranks,
        overheads=overheads,
    )


def _overheads_range(site: MeasuredDevice, ranks: int) -> OverheadsRange:
    """Return the memory that a traced step needs in addition on this device."""
    if site.gpu is None:
        return overheads_on_cpu()
    return overheads_on_gpu(site.gpu.compute_capability, ranks, site.cuda_bytes)


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


def probe_one(
    bench: SubjectBench,
    probe: Probe,
    path: Path,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
) -> ProbedModel:
    """Probe one model and write its profile.

    The arguments are those of ``profile_of_probe``.

    Raises:
        BadInput: If the profile cannot be written.
        OutOfTime, ExceedsMemory, Undecided: As for ``profile_of_probe``.
    """
    check_writable(path.parent)
    profile, trials = profile_of_probe(bench, probe, path, traced, budget_ends_s)
    profile = keep_workers(profile, path)
    previous = write_profile(path, profile)
    return ProbedModel(path=path, previous=previous, profile=profile, trials=trials)


def profile_of_probe(
    bench: SubjectBench,
    probe: Probe,
    path: Path,
    traced: MemoryEstimate | None = None,
    budget_ends_s: float | None = None,
    *,
    study_name: str | None = None,
) -> tuple[Profile, tuple[FinishedTrial, ...]]:
    """Probe one model without writing its profile.

    Args:
        bench: Machine that runs the trials.
        probe: The model and its limits.
        path: Path at which the profile will be written; it names the trial log.
        traced: Result of ``probe.trace``, if known.
        budget_ends_s: Time after which no trial begins, in seconds since 1970; None
            without a limit.
        study_name: Name of the Optuna study; None for that of the path.

    Returns:
        The profile, and every trial.

    Raises:
        OutOfTime: If the time is up before any size ran.
        ExceedsMemory: If not even one sequence fits.
        Undecided: If trials failed for another reason than memory.
    """
    model = probe.config.model
    fingerprint = replace(bench, subject=probe.subject).fingerprint
    reports = report_directory(path, probe.request.reports)
    with bench.display.show(f"probe {model.name}") as update:
        runner = bench.runner(reports, fingerprint, update, _EXPECTED_TRIALS)
        runner.budget_ends_s = budget_ends_s
        size, evidence = probe_subject(
            replace(probe.size_probe(), study_name=study_name or f"{path.stem}: probe"),
            runner,
            bench.site.host.ram_available_bytes,
            traced,
        )
    train = probe.config.model_copy(update={"micro_batch_size": size})
    data = DataSettings(
        path=relative_data_path(probe.request.data, path),
        dataset_hash=probe.manifest.dataset_hash,
    )
    trial_log = trial_log_provenance(runner, fingerprint, train.seq_length_tokens)
    train = train.model_copy(update={"data": data})
    profile = Profile(
        subject=trainer_subject(train),
        train=train,
        constraints=Constraints(
            memory_budget_bytes=probe.memory_budget_bytes,
            headroom_share=probe.request.headroom_share,
            global_batch_tokens=probe.global_batch_tokens,
        ),
        fingerprint=fingerprint,
        provenance=Provenance(
            tool_version=__version__,
            created_utc=utc_now(),
            commands=["probe"],
            slurm_job_id=bench.site.slurm.job_id,
            **trial_log,
        ),
        evidence=Evidence(probe=evidence),
    )
    return profile, tuple(runner.finished)
