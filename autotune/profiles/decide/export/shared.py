"""Settings that all targets take by some name, with the same value and remark. Pure."""

from collections.abc import Mapping

from autotune.evidence.profile import Profile
from autotune.profiles.decide.export.ddp import ddp_rows
from autotune.profiles.decide.export.schedule import schedule_rows
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Value,
    row,
)
from trainer.config.train_config import TrainConfig


def shared_rows(
    profile: Profile, batch: ExportedBatch, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings with one value and one remark in all targets.

    Args:
        profile: Profile to export.
        batch: Optimizer step of the profile and of the export.
        names: Name of each setting in the target; a setting may have none.
        fsdp: True if the target trains with FSDP.
    """
    train = profile.train

    def named(setting: str, value: Value, *, near: str | None = None) -> Equivalent:
        return row(setting, names.get(setting), value, near=near)

    return (
        *_batch_rows(train, batch, names),
        named("learning_rate", train.learning_rate),
        named("weight_decay", train.weight_decay),
        named("adam_epsilon", train.adam_epsilon),
        named("max_steps", train.max_steps),
        named("max_grad_norm", train.max_grad_norm),
        *schedule_rows(train, names),
        named(
            "seed",
            train.seed,
            near="the same seed gives other initial weights and dropout",
        ),
        *_loader_rows(profile, names),
        named(
            "checkpoint.keep_last",
            train.checkpoint.keep_last if train.checkpoint.enabled else None,
        ),
        *ddp_rows(train, names, fsdp=fsdp),
    )


def _batch_rows(
    train: TrainConfig, batch: ExportedBatch, names: Mapping[str, str]
) -> tuple[Equivalent, ...]:
    """Return the micro-batch and global batch, with the reasons why they differ."""
    is_packed = train.layout == "packed"
    micro_batch_remark = None
    if is_packed or batch.per_device_batch_size != train.micro_batch_size:
        micro_batch_remark = "one sample per sequence"
    global_batch_remark = None
    if is_packed or batch.exported_samples_per_step != batch.sequences_per_step:
        global_batch_remark = "whole micro-batches only"
    return (
        row(
            "micro_batch_size",
            names.get("micro_batch_size"),
            batch.per_device_batch_size,
            near=micro_batch_remark,
        ),
        row(
            "global_batch_size",
            names.get("global_batch_size"),
            batch.gradient_accumulation_steps,
            near=global_batch_remark,
        ),
    )


def _loader_rows(profile: Profile, names: Mapping[str, str]) -> tuple[Equivalent, ...]:
    """Return the settings of the DataLoader."""
    train = profile.train
    data = train.data
    # Without workers, torch rejects a prefetch factor and persistent workers.
    has_workers = data.num_workers > 0
    workers_remark = None
    if profile.evidence.workers is not None:
        # They were measured with this project's input pipeline, which masks whole
        # batches: the collator of an export is slower.
        workers_remark = "requires more workers"
    return (
        row(
            "data.num_workers",
            names.get("data.num_workers"),
            data.num_workers,
            near=workers_remark,
        ),
        row(
            "data.prefetch_factor",
            names.get("data.prefetch_factor"),
            data.prefetch_factor if has_workers else None,
        ),
        row(
            "data.pin_memory",
            names.get("data.pin_memory"),
            data.pin_memory and train.device == "cuda",
        ),
        row(
            "workers persist over epochs",
            names.get("workers persist over epochs"),
            True if has_workers else None,
        ),
    )
