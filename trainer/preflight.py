"""Checks before the first step, and the header of the run record: dataset, model and machine."""

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
from trainer.data.batch_plan import BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig, ProfileMismatch
from trainer.health.events import EventRow, new_event, utc_now
from trainer.model.flops import matmul_format, peak_flops_per_s
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
_PROBE_AGAIN = "Check on this machine: autotune profile verify PROFILE"
_SHOULD_AGREE = ("device", "device_memory_bytes", "allotted_cpus")


def _remark(message: str, next_step: str) -> EventRow:
    """Return a warning event, which does not stop training from starting."""
    return new_event(0, "preflight", message, level="warning", next_step=next_step)


def check_ranks(
    resolved: ResolvedConfig, dataset_hash: str, ranks: Ranks
) -> tuple[list[EventRow], tuple[str, ...]]:
    """Compare all ranks with each other and with the profile.

    Return warnings, and the host of each rank.

    Raise ``BadConfig`` if ranks differ in a way that would make training silently
    wrong, ``ProfileMismatch`` if the profile was tuned for more GPU memory than some
    rank has.
    """
    facts = ranks.all_gather_object(
        facts_of_rank(resolved, dataset_hash=dataset_hash, ranks=ranks)
    )
    remarks = compare_ranks(facts)
    for one in facts:
        said = {remark.message for remark in remarks}
        remarks += [
            remark
            for remark in compare_profile(resolved.fingerprint, one)
            if remark.message not in said
        ]
    return remarks, tuple(one["host"] for one in facts)


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
    unbound: int | None = None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the CPUs of this process: the least of affinity (or ``unbound``), cgroup quota (v2, v1) and SLURM."""
    found = [len(os.sched_getaffinity(0)) if unbound is None else unbound]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text()
        path = re.search(r"^0::/?(.*)$", group, re.MULTILINE)
        own = Path(path[1]) if path else Path()
        for level in (own, *own.parents):  # a quota of any level counts
            with contextlib.suppress(OSError):
                quota, period = (root / level / "cpu.max").read_text().split()
                if quota != "max":
                    found.append(max(1, int(quota) // int(period)))
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (
            int((root / "cpu" / f"cpu.cfs_{name}_us").read_text())
            for name in ("quota", "period")
        )
        if quota_us > 0:
            found.append(max(1, quota_us // period_us))
    with contextlib.suppress(ValueError):
        found.append(int(environment.get("SLURM_CPUS_PER_TASK", "")))
    return min(found)


def compare_ranks(facts: Sequence[Mapping[str, str]]) -> list[EventRow]:
    """Compare all ranks and return warnings.

    Raises:
        BadConfig: If a difference would make training silently wrong.
    """
    for name, next_step in _MUST_AGREE.items():
        if found := _differing(facts, name):
            raise BadConfig(
                f"ranks differ in their {name}: {found}", next_step=next_step
            )
    slow = {
        name.replace("_", " "): found
        for name in _SHOULD_AGREE
        if (found := _differing(facts, name))
    }
    next_step = "Request nodes of one kind, with the same number of CPU cores."
    what = "ranks differ in their {}: {}; every step waits for the slowest"
    return [_remark(what.format(*one), next_step) for one in slow.items()]


def _differing(facts: Sequence[Mapping[str, str]], name: str) -> str:
    """Return each value with the ranks that have it, as text.

    Empty if all ranks have the same.
    """
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        found.setdefault(one[name], []).append(rank)
    return (
        "; ".join(f"{value[:24]} on {_named(ranks)}" for value, ranks in found.items())
        if len(found) > 1
        else ""
    )


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return (
        f"{'rank' if len(ranks) == 1 else 'ranks'}"
        f" {', '.join(map(str, ranks[:4]))}{more}"
    )


def compare_profile(
    fingerprint: Mapping[str, Any], facts: Mapping[str, str]
) -> list[EventRow]:
    """Compare a rank's machine with the profile's.

    Raises:
        ProfileMismatch: If its GPU has less memory.
    """
    remarks = []
    tuned_bytes, here_bytes = (
        fingerprint.get("gpu_total_bytes"),
        facts["device_memory_bytes"],
    )
    if (
        isinstance(tuned_bytes, int)
        and here_bytes.isdecimal()
        and int(here_bytes) < 0.97 * tuned_bytes
    ):
        # NVML's total, which the profile has, is up to 3 % above torch's.
        had, has = (
            f"{size / 2**30:.0f} GiB" for size in (tuned_bytes, int(here_bytes))
        )
        what = f"the profile was tuned for a GPU of {had}; this one has only {has}"
        raise ProfileMismatch(
            what,
            next_step=(
                "Write a profile for this GPU: autotune tune --model MODEL --data DIR"
            ),
        )
    here = {"gpu_name": facts["device"], "torch": facts["torch"].partition("+")[0]}
    if fingerprint.get("device") == "cpu" and facts["device"] != "cpu":
        remarks.append(
            _remark(
                "the profile was tuned for a CPU, but this rank has a GPU", _PROBE_AGAIN
            )
        )
    for name in ("gpu_name", "torch"):
        tuned = fingerprint.get(name)
        if isinstance(tuned, str) and tuned.partition("+")[0] != here[name]:
            message = (
                f"the profile was tuned with {name.replace('_', ' ')} {tuned}; this"
                f" rank has {here[name]}"
            )
            remarks.append(_remark(message, _PROBE_AGAIN))
    tuned_cpus, cpus = fingerprint.get("allotted_cpus"), int(facts["allotted_cpus"])
    if isinstance(tuned_cpus, int) and cpus < tuned_cpus:
        message = (
            f"the profile was tuned with {tuned_cpus} available CPU cores; this rank"
            f" has {cpus}"
        )
        remarks.append(
            _remark(
                message,
                "Request as many (SLURM: --cpus-per-task), or run: autotune workers"
                " PROFILE",
            )
        )
    return remarks


def check_directory(
    writer: RunWriter,
    config: TrainConfig,
    checkpoint_bytes: int,
    there: int,
    ranks: Ranks,
) -> list[EventRow]:
    """Check that the run directory, with ``there`` checkpoints, can keep them.

    If not, raise ``BadConfig``.
    """
    kept = config.checkpoint.keep_last
    remarks = check_room(
        writer.directory,
        checkpoint_bytes,
        ranks,
        there=ranks.broadcast_object(there),
        kept=kept,
    )
    remarks += check_shared(
        writer.directory, ranks, needed=config.parallel.strategy != "ddp"
    )
    if ranks.leads and writer.lock is None:
        message = (
            f"the file system of {writer.directory} has no locks, so a second start is"
            " not prevented"
        )
        remarks.append(
            _remark(
                message,
                "Make sure that no other job resumes this run at the same time.",
            )
        )
    return remarks


def check_shared(place: Path, ranks: Ranks, *, needed: bool) -> list[EventRow]:
    """Check that all ranks see rank 0's run directory.

    If not, raise ``BadConfig`` if ``needed``, otherwise warn.
    """
    token = ranks.broadcast_object(secrets.token_hex(8) if ranks.leads else "")
    file = place / f".seen-by-all-ranks.{token}"
    if ranks.leads:
        file.touch()
    ranks.all_reduce_sum(0.0)
    missing = [
        rank
        for rank, misses in enumerate(ranks.all_gather_float(float(not file.exists())))
        if misses
    ]
    if ranks.leads:
        file.unlink()
    if not missing:
        return []
    message = f"{place} of rank 0 not found on {_named(missing)}"
    next_step = "Choose an --out on a file system that all nodes share."
    if needed:
        raise BadConfig(
            f"{message}, but all ranks write checkpoints there", next_step=next_step
        )
    return [
        _remark(f"{message}: they cannot record their exit in exit.json", next_step)
    ]


def check_room(
    place: Path,
    checkpoint_bytes: int,
    ranks: Ranks,
    *,
    there: int,
    kept: int = CHECKPOINTS_THAT_FIT,
) -> list[EventRow]:
    """Check, on rank 0, that the disk has room for the checkpoints that must exist at once.

    Raises ``BadConfig`` if not; only warns if the run has a checkpoint already, or if
    fewer than ``kept`` fit.
    """
    free = ranks.broadcast_object(shutil.disk_usage(place).free if ranks.leads else 0)
    has = f"{place} has {free / 2**20:,.0f} MiB free"
    if free >= max(1, kept + 1 - there) * checkpoint_bytes:
        return []
    if free >= max(1, CHECKPOINTS_THAT_FIT - there) * checkpoint_bytes:
        taken = f"{(kept + 1) * checkpoint_bytes / 2**20:,.0f} MiB"
        next_step = (
            "Free disk space, or lower train.checkpoint.keep_last; otherwise some saves"
            " will fail."
        )
        return [
            _remark(
                f"{has}; keeping {kept} checkpoints while writing the next requires"
                f" {taken}",
                next_step,
            )
        ]
    taken = f"{CHECKPOINTS_THAT_FIT * checkpoint_bytes / 2**20:,.0f} MiB"
    message = f"{has}; {CHECKPOINTS_THAT_FIT} checkpoints require {taken}"
    if there:
        return [_remark(message, "Free disk space, or the next save will fail.")]
    next_step = (
        "Free disk space, choose another --out, or disable checkpoints: --set"
        " train.checkpoint.enabled=false"
    )
    raise BadConfig(message, next_step=next_step)


def open_dataset(resolved: ResolvedConfig) -> TokenDataset:
    """Open the dataset.

    Raises:
        BadConfig: If it is empty, or its hash does not match the profile.
    """
    dataset = TokenDataset.open(resolved.data_dir)
    expected, found = resolved.config.data.dataset_hash, dataset.manifest.dataset_hash
    if expected is not None and expected != found:
        hashes = f"its hash is {found[:12]}…, not {expected[:12]}…"
        next_step = (
            "Pass the profile's dataset with --data DIR, or tune again on this one:"
            " autotune tune --data DIR"
        )
        what = f"dataset {resolved.data_dir} does not match the profile: {hashes}"
        raise BadConfig(what, next_step=next_step, docs="dataset-mismatch")
    if not len(dataset):
        raise BadConfig(
            f"dataset {resolved.data_dir} is empty",
            next_step="Pass another one with --data DIR.",
        )
    return dataset


def driver_of(ranks: Ranks) -> str | None:
    """Return the version of this rank's GPU driver.

    None on a CPU, or if NVML does not report it.
    """
    if ranks.device.type == "cuda":
        with contextlib.suppress(ImportError):
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                return str(nvml.nvmlSystemGetDriverVersion())
    return None


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
    """Return the content of ``run.json``, except for ``attempt``, which the run's writer sets."""
    config, attention = resolved.config, training.module.attention
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
        dataset_hash=dataset.manifest.dataset_hash,
        parameters=training.work.parameters,
        attention=attention.kind,
        attention_reason=attention.reason,
        recipe_changes=list(training.recipe_changes),
        hosts=list(hosts),
        device=ranks.device_name,
        driver=driver_of(ranks),
        peak_flops_per_s=peak_flops_per_s(
            ranks.device_name, matmul_format(config.precision, tf32=config.tf32)
        ),
        versions={
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "numpy")
        }
        | {"python": platform.python_version()},
    )
