"""Settings that all targets take by some name, and those that none takes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.profiles.decide.export.schedule import their_schedule
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Raw,
    Scalar,
    Value,
    row,
)
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig

NO_RECORD = "without run record, steps and events"
OTHER_ORDER = "a different permutation of each epoch"
HSDP = "HSDP: all ranks share one copy of the weights"
_TORCHS_BUCKET_CAP_MIB = 25
"""Default of torch: if no size is given, it makes the first bucket smaller, so that it
is sent early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRemarks:
    """Remarks that several targets share; None if they do not apply."""

    activation_checkpointing: str | None
    layout: str | None
    strategy: str | None
    gradient_dtype: str | None
    """Remark of a target without a hook to compress gradients."""
    stop_after_s: str | None
    weights: str | None


def shared_remarks(train: TrainConfig, *, fsdp: bool) -> SharedRemarks:
    """Return the remarks that apply to these settings.

    Args:
        train: Settings to export.
        fsdp: True if the target trains with FSDP.
    """
    recomputes = None
    if train.activation_checkpointing == "selective":
        recomputes = "recomputes matmuls as well"
    layout = None
    if train.layout == "packed":
        layout = (
            "packing would allow cross-document attention: one padded sample per"
            " sequence"
        )
    strategy = None
    if train.parallel.strategy != "ddp" and not fsdp:
        strategy = "plain DDP: every rank holds the whole optimizer state"
    no_early_stop = None
    if train.stop_after_s is not None:
        no_early_stop = "does not save and exit before the time limit"
    weights = None
    if fsdp and train.precision == "bf16":
        weights = "with bf16 it gathers weights and reduces gradients in bf16"
    return SharedRemarks(
        activation_checkpointing=recomputes,
        layout=layout,
        strategy=strategy,
        gradient_dtype=_gradient_dtype_remark(train, fsdp=fsdp),
        stop_after_s=no_early_stop,
        weights=weights,
    )


def _gradient_dtype_remark(train: TrainConfig, *, fsdp: bool) -> str | None:
    dtype = train.parallel.gradient_dtype
    if fsdp and train.precision == "bf16":
        if dtype != "bf16":
            return "synchronises gradients in bf16, as bf16 is on"
    elif dtype != "fp32":
        return "synchronises gradients in fp32: twice the bytes"
    return None


def ddp_names(template: str) -> dict[str, str]:
    """Return the names of DDP's settings, each in place of ``{}`` in a template."""
    names = {
        "parallel.bucket_cap_mib": "bucket_cap_mb",
        "parallel.static_graph": "static_graph",
        "every parameter is used": "find_unused_parameters",
        "no synchronisation of buffers": "broadcast_buffers",
    }
    return {setting: template.replace("{}", name) for setting, name in names.items()}


def hooked_rows(
    train: TrainConfig, call: str, hook: str, dtype: str, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of gradients that DDP takes as arguments of a call.

    Args:
        train: Settings to export.
        call: Function that takes DDP's arguments.
        hook: Its argument for the hook that compresses gradients.
        dtype: Code of the hook.
        fsdp: True if the target trains with FSDP, which has no hook.
    """
    parallel = train.parallel
    has_hook = parallel.gradient_dtype != "fp32" and not fsdp
    lost_dtype = shared_remarks(train, fsdp=fsdp).gradient_dtype if fsdp else None
    return (
        row(
            "parallel.gradient_dtype",
            f"{call}({hook})",
            Raw(dtype) if has_hook else None,
            lost=lost_dtype,
        ),
        row(
            "parallel.gradient_as_bucket_view",
            f"{call}(gradient_as_bucket_view)",
            None if fsdp else parallel.gradient_as_bucket_view,
        ),
    )


def shared_rows(
    profile: Profile, batch: ExportedBatch, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings with one value and one remark in all targets.

    Args:
        profile: Profile to export.
        batch: Its optimizer step.
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
        *_schedule_rows(train, names),
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
        *_ddp_rows(train, names, fsdp=fsdp),
    )


def _batch_rows(
    train: TrainConfig, batch: ExportedBatch, names: Mapping[str, str]
) -> tuple[Equivalent, ...]:
    packed = train.layout == "packed"
    other_size = batch.per_device_batch_size != train.micro_batch_size
    other_batch = batch.exported_samples_per_step != batch.sequences_per_step
    return (
        row(
            "micro_batch_size",
            names.get("micro_batch_size"),
            batch.per_device_batch_size,
            near="one sample per sequence" if packed or other_size else None,
        ),
        row(
            "global_batch_size",
            names.get("global_batch_size"),
            batch.gradient_accumulation_steps,
            near="whole micro-batches only" if packed or other_batch else None,
        ),
    )


def _schedule_rows(
    train: TrainConfig, names: Mapping[str, str]
) -> tuple[Equivalent, ...]:
    schedule = their_schedule(train)
    warm_up = None
    if train.warmup_steps > 0:
        # With n steps of warm-up it has the share 0/n, in this project's trainer 1/n.
        warm_up = "its first step has learning rate 0: the warm-up lags by one step"
        if train.schedule == "wsd" and train.final_learning_rate_share:
            warm_up = "its warm-up starts at the final learning rate instead of 0"
    return (
        row("schedule", names.get("schedule"), schedule.name),
        row(
            "final_learning_rate_share",
            names.get("final_learning_rate_share"),
            schedule.arguments or None,
        ),
        row(
            "warmup_steps", names.get("warmup_steps"), train.warmup_steps, near=warm_up
        ),
    )


def _loader_rows(profile: Profile, names: Mapping[str, str]) -> tuple[Equivalent, ...]:
    train = profile.train
    data = train.data
    has_workers = data.num_workers > 0
    more_workers = None
    if profile.evidence.workers is not None:
        more_workers = "requires more workers"
    return (
        row(
            "data.num_workers",
            names.get("data.num_workers"),
            data.num_workers,
            near=more_workers,
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


def _ddp_rows(
    train: TrainConfig, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of DDP, which leave an FSDP target at its defaults."""
    parallel = train.parallel
    values: dict[str, Scalar] = {
        "parallel.bucket_cap_mib": None,
        "parallel.static_graph": None,
        "every parameter is used": None,
        "no synchronisation of buffers": None,
    }
    if not fsdp:
        if parallel.bucket_cap_mib != _TORCHS_BUCKET_CAP_MIB:
            values["parallel.bucket_cap_mib"] = parallel.bucket_cap_mib
        if parallel.static_graph:
            values["parallel.static_graph"] = True
        # Always written: transformers looks for unused parameters by default, and DDP
        # sends buffers by default.
        values["every parameter is used"] = False
        values["no synchronisation of buffers"] = False
    return tuple(
        row(setting, names.get(setting), value) for setting, value in values.items()
    )
