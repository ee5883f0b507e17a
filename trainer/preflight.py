"""Checks before the first step, and the header of the run record."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.build import Training
from trainer.checkpoint.resume import Start, job_name
from trainer.config.resolve import ResolvedConfig
from trainer.config.train_config import BatchSplit, TrainConfig
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.data.manifest import MAX_CUT_TOKENS_SHARE, Manifest
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig, ProfileMismatch
from trainer.health.events import EventRow, new_event, utc_now
from trainer.model.gpu_peaks import matmul_format, peak_flops_per_s
from trainer.record.run_record import RUN_SCHEMA_VERSION, RunHeader, code_sha256
from trainer.record.writer import RunWriter

CHECKPOINTS_THAT_FIT = 2
"""Fewest checkpoints that must fit on disk: the newest is kept until the next one is
complete."""
_MUST_AGREE = {
    "configuration": "Start every rank with the same profile and the same --set.",
    "code": "Install the same version of this package on every node.",
    "dataset": "Use the same dataset on every node; the copy on one node differs.",
    "torch": "Install the same version of torch on every node.",
    "transformers": "Install the same version of transformers on every node.",
    "python": "Use the same version of Python on every node.",
}
"""Facts that must be the same on all ranks, with the next step if they are not."""
_SHOULD_AGREE = ("device", "device_memory_bytes", "allotted_cpus")
"""Facts in which a rank that differs slows down all others."""
_SHOWN_RANKS = 4
_VERIFY_AGAIN = "Check on this machine: autotune profile verify PROFILE"
_SAME_MEMORY_SHARE = 0.97
"""Least share of a profile's GPU memory that the same GPU has here: NVML's total, which
profiles have, is up to 3 % above torch's."""


def _warning(message: str, next_step: str) -> EventRow:
    """Return a warning event, which does not stop training from starting."""
    return new_event(0, "preflight", message, level="warning", next_step=next_step)


def open_dataset(resolved: ResolvedConfig) -> TokenDataset:
    """Open the dataset.

    Raises:
        BadConfig: If it is empty, or its hash does not match the profile.
    """
    dataset = TokenDataset.open(resolved.data_dir)
    expected_hash = resolved.config.data.dataset_hash
    dataset_hash = dataset.manifest.dataset_hash
    if expected_hash is not None and expected_hash != dataset_hash:
        raise BadConfig(
            f"dataset {resolved.data_dir} does not match the profile: its hash is"
            f" {dataset_hash[:12]}…, not {expected_hash[:12]}…",
            next_step=(
                "Pass the profile's dataset with --data DIR, or tune again on this"
                " one: autotune tune --model MODEL --data DIR"
            ),
            docs="dataset-mismatch",
        )
    if not len(dataset):
        raise BadConfig(
            f"dataset {resolved.data_dir} is empty",
            next_step="Pass another one with --data DIR.",
        )
    return dataset


def check_data(
    config: TrainConfig, manifest: Manifest, directory: Path
) -> list[EventRow]:
    """Return warnings about text that is cut off, and about missing validation data."""
    warnings = []
    limit_tokens = config.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    cut_share = manifest.train.cut_tokens_share(limit_tokens)
    if cut_share is not None and cut_share > MAX_CUT_TOKENS_SHARE:
        warnings.append(
            _warning(
                f"{cut_share:.1%} of the tokens in {directory} are cut off at the"
                f" sequence length of {config.seq_length_tokens}",
                "Tune for longer sequences (--seq-length), or prepare the dataset again"
                f" with --max-tokens {limit_tokens} --long split.",
            )
        )
    if config.evaluation.interval_steps is not None and not manifest.validation.samples:
        warnings.append(
            _warning(
                f"train.evaluation.interval_steps = {config.evaluation.interval_steps}"
                f" has no effect: {directory} has 0 validation samples, and"
                f" {manifest.train.samples:,} for training",
                "Prepare the dataset again with a larger --validation-share.",
            )
        )
    return warnings


def check_ranks(
    resolved: ResolvedConfig, dataset_hash: str, ranks: Ranks
) -> tuple[list[EventRow], tuple[str, ...]]:
    """Compare all ranks with each other and with the profile.

    Returns:
        Warnings, each once, and the host of each rank.

    Raises:
        BadConfig: If ranks differ in a way that would make training silently wrong.
        ProfileMismatch: If the profile was tuned for more GPU memory than some rank
            has.
    """
    facts_by_rank = ranks.all_gather_object(
        facts_of_rank(resolved, dataset_hash=dataset_hash, ranks=ranks)
    )
    warnings = compare_ranks(facts_by_rank)
    for facts in facts_by_rank:
        known_messages = {warning.message for warning in warnings}
        warnings += [
            warning
            for warning in compare_profile(resolved.fingerprint, facts)
            if warning.message not in known_messages
        ]
    return warnings, tuple(facts["host"] for facts in facts_by_rank)


def facts_of_rank(
    resolved: ResolvedConfig, *, dataset_hash: str, ranks: Ranks
) -> dict[str, str]:
    """Return the host of a rank, and the facts by which ranks are compared."""
    return {
        "host": platform.node(),
        "configuration": resolved.config_sha256,
        "code": code_sha256(),
        "dataset": dataset_hash,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "device": ranks.device_name,
        "device_memory_bytes": str(ranks.device_memory_bytes),
        "allotted_cpus": str(allotted_cpus(ranks.cpus_before_binding)),
    }


def allotted_cpus(
    unbound_cpus: int | None = None,
    environment: Mapping[str, str] = os.environ,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the number of CPUs that this process may use.

    The least of its affinity, the quotas of its control group (v2 and v1) and SLURM's
    CPUs per task.

    Args:
        unbound_cpus: Affinity before this process was bound to some CPUs; None if it
            was not.
        environment: Environment variables.
        cgroup_root: Root of the control groups.
    """
    if unbound_cpus is None:
        unbound_cpus = len(os.sched_getaffinity(0))
    limits = [unbound_cpus]
    limits += _cgroup_v2_cpus(cgroup_root)
    limits += _cgroup_v1_cpus(cgroup_root)
    with contextlib.suppress(ValueError):
        limits.append(int(environment.get("SLURM_CPUS_PER_TASK", "")))
    return min(limits)


def _cgroup_v2_cpus(root: Path) -> list[int]:
    """Return the CPU quotas of this process's control group and all above it."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text()
        match = re.search(r"^0::/?(.*)$", groups, re.MULTILINE)
        group = Path(match[1]) if match else Path()
        for level in (group, *group.parents):
            with contextlib.suppress(OSError):
                quota_us, period_us = (root / level / "cpu.max").read_text().split()
                if quota_us != "max":
                    limits.append(max(1, int(quota_us) // int(period_us)))
    return limits


def _cgroup_v1_cpus(root: Path) -> list[int]:
    """Return the CPU quota of the older control groups, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        if quota_us > 0:
            return [max(1, quota_us // period_us)]
    return []


def compare_ranks(facts_by_rank: Sequence[Mapping[str, str]]) -> list[EventRow]:
    """Compare all ranks and return warnings.

    Raises:
        BadConfig: If a difference would make training silently wrong.
    """
    for name, next_step in _MUST_AGREE.items():
        difference = _difference(facts_by_rank, name)
        if difference is not None:
            raise BadConfig(
                f"ranks differ in their {name}: {difference}", next_step=next_step
            )
    warnings = []
    for name in _SHOULD_AGREE:
        difference = _difference(facts_by_rank, name)
        if difference is not None:
            warnings.append(
                _warning(
                    f"ranks differ in their {name.replace('_', ' ')}: {difference};"
                    " every step waits for the slowest",
                    "Request nodes of one kind, with the same number of CPU cores.",
                )
            )
    return warnings


def _difference(facts_by_rank: Sequence[Mapping[str, str]], name: str) -> str | None:
    """Return each value of a fact with the ranks that have it, as text.

    None if all ranks have the same.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        ranks_by_value.setdefault(facts[name], []).append(rank)
    if len(ranks_by_value) <= 1:
        return None
    return "; ".join(
        f"{value[:24]} on {_named(ranks)}" for value, ranks in ranks_by_value.items()
    )


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as text, the first ones by number."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = f"{noun} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}"
    more = len(ranks) - _SHOWN_RANKS
    if more > 0:
        text += f" and {more} more"
    return text


def compare_profile(
    fingerprint: Mapping[str, Any], facts: Mapping[str, str]
) -> list[EventRow]:
    """Compare a rank's machine with the profile's, and return warnings.

    Raises:
        ProfileMismatch: If its GPU has less memory.
    """
    _check_gpu_memory(fingerprint.get("gpu_total_bytes"), facts["device_memory_bytes"])
    warnings = []
    if fingerprint.get("device") == "cpu" and facts["device"] != "cpu":
        warnings.append(
            _warning(
                "the profile was tuned for a CPU, but this rank has a GPU",
                _VERIFY_AGAIN,
            )
        )
    versions = {"gpu_name": facts["device"], "torch": facts["torch"].partition("+")[0]}
    for name, version in versions.items():
        tuned_version = fingerprint.get(name)
        if not isinstance(tuned_version, str):
            continue
        if tuned_version.partition("+")[0] != version:
            warnings.append(
                _warning(
                    f"the profile was tuned with {name.replace('_', ' ')}"
                    f" {tuned_version}; this rank has {version}",
                    _VERIFY_AGAIN,
                )
            )
    tuned_cpus = fingerprint.get("allotted_cpus")
    cpus = int(facts["allotted_cpus"])
    if isinstance(tuned_cpus, int) and cpus < tuned_cpus:
        warnings.append(
            _warning(
                f"the profile was tuned with {tuned_cpus} available CPU cores; this"
                f" rank has {cpus}",
                "Request as many (SLURM: --cpus-per-task), or run: autotune workers"
                " PROFILE",
            )
        )
    return warnings


def _check_gpu_memory(tuned_bytes: object, device_memory: str) -> None:
    """Raise ``ProfileMismatch`` if a GPU has less memory than the profile's."""
    if not isinstance(tuned_bytes, int) or not device_memory.isdecimal():
        return
    device_bytes = int(device_memory)
    if device_bytes < _SAME_MEMORY_SHARE * tuned_bytes:
        raise ProfileMismatch(
            f"the profile was tuned for a GPU of {tuned_bytes / 2**30:.0f} GiB; this"
            f" one has only {device_bytes / 2**30:.0f} GiB",
            next_step=(
                "Write a profile for this GPU: autotune tune --model MODEL --data DIR"
            ),
        )


def check_directory(
    writer: RunWriter,
    config: TrainConfig,
    checkpoint_bytes: int,
    existing_checkpoints: int,
    ranks: Ranks,
) -> list[EventRow]:
    """Check that the run directory can keep the checkpoints, and return warnings.

    Args:
        writer: Writer of the run record.
        config: Configuration of the run.
        checkpoint_bytes: Size of a checkpoint.
        existing_checkpoints: Number of checkpoints in the directory, as rank 0 knows.
        ranks: This process's rank.

    Raises:
        BadConfig: If it cannot.
    """
    warnings = check_room(
        writer.directory,
        checkpoint_bytes,
        ranks,
        existing=ranks.broadcast_object(existing_checkpoints),
        keep_last=config.checkpoint.keep_last,
    )
    warnings += check_shared(
        writer.directory, ranks, needed=config.parallel.strategy != "ddp"
    )
    if ranks.leads and writer.lock is None:
        warnings.append(
            _warning(
                f"the file system of {writer.directory} has no locks, so a second start"
                " is not prevented",
                "Make sure that no other job resumes this run at the same time.",
            )
        )
    return warnings


def check_room(
    directory: Path,
    checkpoint_bytes: int,
    ranks: Ranks,
    *,
    existing: int,
    keep_last: int = CHECKPOINTS_THAT_FIT,
) -> list[EventRow]:
    """Check, on rank 0, that the disk has room for the checkpoints that exist at once.

    Args:
        directory: Run directory.
        checkpoint_bytes: Size of a checkpoint.
        ranks: This process's rank.
        existing: Number of checkpoints in the directory.
        keep_last: Number of checkpoints to keep while the next one is written.

    Returns:
        A warning if fewer than ``keep_last`` fit, or if the next save will fail.

    Raises:
        BadConfig: If the run has no checkpoint yet, and not even
            ``CHECKPOINTS_THAT_FIT`` fit.
    """
    free_bytes = 0
    if ranks.leads:
        free_bytes = shutil.disk_usage(directory).free
    free_bytes = ranks.broadcast_object(free_bytes)
    free = f"{directory} has {free_bytes / 2**20:,.0f} MiB free"
    # Existing checkpoints have their room already; each save needs room for one more.
    checkpoints_to_keep = max(1, keep_last + 1 - existing)
    if free_bytes >= checkpoints_to_keep * checkpoint_bytes:
        return []
    checkpoints_to_save = max(1, CHECKPOINTS_THAT_FIT - existing)
    if free_bytes >= checkpoints_to_save * checkpoint_bytes:
        required_mib = (keep_last + 1) * checkpoint_bytes / 2**20
        return [
            _warning(
                f"{free}; keeping {keep_last} checkpoints while writing the next"
                f" requires {required_mib:,.0f} MiB",
                "Free disk space, or lower train.checkpoint.keep_last; otherwise some"
                " saves will fail.",
            )
        ]
    required_mib = CHECKPOINTS_THAT_FIT * checkpoint_bytes / 2**20
    message = (
        f"{free}; {CHECKPOINTS_THAT_FIT} checkpoints require {required_mib:,.0f} MiB"
    )
    if existing:
        return [_warning(message, "Free disk space, or the next save will fail.")]
    raise BadConfig(
        message,
        next_step=(
            "Free disk space, choose another --out, or disable checkpoints: --set"
            " train.checkpoint.enabled=false"
        ),
    )


def check_shared(directory: Path, ranks: Ranks, *, needed: bool) -> list[EventRow]:
    """Check that all ranks see rank 0's run directory.

    Returns:
        A warning if not.

    Raises:
        BadConfig: If not, and it is ``needed``.
    """
    token = ranks.broadcast_object(secrets.token_hex(8) if ranks.leads else "")
    file = directory / f".seen-by-all-ranks.{token}"
    if ranks.leads:
        file.touch()
    ranks.all_reduce_sum(0.0)  # no rank looks before the file exists
    misses_by_rank = ranks.all_gather_float(float(not file.exists()))
    if ranks.leads:
        file.unlink()
    missing_on = [rank for rank, misses in enumerate(misses_by_rank) if misses]
    if not missing_on:
        return []
    message = f"{directory} of rank 0 not found on {_named(missing_on)}"
    next_step = "Choose an --out on a file system that all nodes share."
    if needed:
        raise BadConfig(
            f"{message}, but all ranks write checkpoints there", next_step=next_step
        )
    return [
        _warning(f"{message}: they cannot record their exit in exit.json", next_step)
    ]


def describe_run(
    resolved: ResolvedConfig,
    dataset: TokenDataset,
    plan: BatchPlan,
    training: Training,
    *,
    hosts: Sequence[str],
    ranks: Ranks,
    start: Start,
) -> RunHeader:
    """Return the content of ``run.json``; its writer sets ``attempt``."""
    config = resolved.config
    attention = training.module.attention
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "numpy")
    }
    return RunHeader(
        **plan.model_dump(include=set(BatchSplit.model_fields)),
        schema_version=RUN_SCHEMA_VERSION,
        name=config.model.name,
        job=job_name(os.environ),
        started_utc=utc_now(),
        resumed_from=start.origin,
        resumed_step=0 if start.manifest is None else start.manifest.state.step,
        config=config.model_dump(mode="json"),
        sources=dict(resolved.sources),
        profile_sha256=resolved.profile_sha256,
        profile_modified=resolved.profile_modified,
        dataset_hash=dataset.manifest.dataset_hash,
        parameters=training.work.parameters,
        attention=attention.kind,
        attention_reason=attention.reason,
        recipe_changes=list(training.recipe_changes),
        hosts=list(hosts),
        device=ranks.device_name,
        driver=gpu_driver_version(ranks),
        peak_flops_per_s=peak_flops_per_s(
            ranks.device_name, matmul_format(config.precision, tf32=config.tf32)
        ),
        versions=versions | {"python": platform.python_version()},
    )


def gpu_driver_version(ranks: Ranks) -> str | None:
    """Return the version of this rank's GPU driver.

    None on a CPU, or if NVML does not report it.
    """
    if ranks.device.type != "cuda":
        return None
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return str(nvml.nvmlSystemGetDriverVersion())
    return None
