"""Export of a profile to transformers 5.23's ``TrainingArguments``. Pure."""

import math

from autotune.evidence.profile import Profile
from autotune.profiles.decide.export import remarks
from autotune.profiles.decide.export.batch import checkpoint_interval
from autotune.profiles.decide.export.ddp import ddp_names
from autotune.profiles.decide.export.shared import shared_rows
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Value,
    row,
)
from autotune.profiles.decide.export.unexpressed import unexpressed_rows
from trainer.config.train_config import TrainConfig

WRITTEN_FOR = "transformers 5.23"
"""Version of the library whose names the export has."""
CALLS: dict[str, str] = {}
"""Code of the training loop, by function: none, as the Trainer has its own loop."""
NAMES = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "max_steps": "max_steps",
    "warmup_steps": "warmup_steps",
    "seed": "seed",
    "schedule": "lr_scheduler_type",
    "final_learning_rate_share": "lr_scheduler_kwargs",
    "micro_batch_size": "per_device_train_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
    "data.num_workers": "dataloader_num_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "workers persist over epochs": "dataloader_persistent_workers",
    "checkpoint.keep_last": "save_total_limit",
    **ddp_names("ddp_{}"),
}
"""Name of each shared setting in ``TrainingArguments``."""


def settings(
    profile: Profile, batch: ExportedBatch, _nodes: int
) -> tuple[Equivalent, ...]:
    """Return every setting, with the argument that expresses it, or what is lost.

    Args:
        profile: Profile to export.
        batch: Optimizer step of the profile and of the export.
        _nodes: Ignored: your launcher sets the nodes, other targets set them in their
            file.
    """
    train = profile.train
    fsdp = train.parallel.strategy == "fsdp2"
    return (
        *unexpressed_rows(train),
        *shared_rows(profile, batch, NAMES, fsdp=fsdp),
        *_step_rows(train, fsdp=fsdp),
        row(
            "run directory",
            "output_dir",
            f"runs/hf-{train.model.name}",
            near=remarks.NO_RECORD,
        ),
        row(
            "evaluation.max_sequences",
            "per_device_eval_batch_size",
            batch.per_device_batch_size,
            near="the whole dataset, other masks",
        ),
        _layout_row(train),
        *_optimizer_rows(train),
        *_log_rows(train),
        row("order of the data", "data_seed", train.seed, near=remarks.OTHER_ORDER),
        *_checkpoint_rows(profile, batch),
        *_evaluation_rows(train),
        *_lost_rows(train),
        *_parallel_rows(train, fsdp=fsdp),
        *_gradient_rows(train, batch.ranks, fsdp=fsdp),
    )


def _step_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the settings of device, precision, compiling and checkpointing."""
    on_gpu = train.device == "cuda"
    takes_tf32 = on_gpu and train.precision == "fp32"
    # FSDP checkpoints activations itself.
    has_checkpointing = train.activation_checkpointing != "none" and not fsdp
    return (
        row("device", "use_cpu", not on_gpu),
        row("precision", "bf16", train.precision == "bf16"),
        row("tf32", "tf32", train.tf32 if takes_tf32 else None),
        row(
            "compile",
            "torch_compile",
            train.compiled,
            near="compiles the whole model at once" if train.compiled else None,
        ),
        row(
            "compile_mode",
            "torch_compile_mode",
            train.compile_mode if train.compiled else None,
        ),
        row(
            "activation_checkpointing",
            "gradient_checkpointing",
            True if has_checkpointing else None,
            near=remarks.activation_checkpointing_remark(train),
        ),
    )


def _layout_row(train: TrainConfig) -> Equivalent:
    """Return the layout: the Trainer groups by length, but does not pack."""
    if train.layout == "bucketed":
        return row(
            "layout",
            "train_sampling_strategy",
            "group_by_length",
            near=(
                "groups samples of similar length within 50 batches: steps are not"
                " independent draws"
            ),
        )
    return row("layout", "train_sampling_strategy", lost=remarks.layout_remark(train))


def _optimizer_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of AdamW that the Trainer takes one by one."""
    return (
        row("adam_beta1", "adam_beta1", train.adam_beta1),
        row("adam_beta2", "adam_beta2", train.adam_beta2),
        row("fused AdamW", "optim", "adamw_torch_fused"),
    )


def _log_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of logs."""
    return (
        row("log_interval_steps", "logging_steps", train.logged_steps),
        row("log_to", "report_to", [*train.log_to] if train.log_to else None),
        row("losses that are not finite are logged", "logging_nan_inf_filter", False),
    )


def _checkpoint_rows(profile: Profile, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    """Return the settings of checkpoints, which are saved every few steps."""
    is_enabled = profile.train.checkpoint.enabled
    interval = checkpoint_interval(profile, batch)
    return (
        row("checkpoint.enabled", "save_strategy", "steps" if is_enabled else "no"),
        row(
            "checkpoint.interval_s",
            "save_steps",
            interval.steps if is_enabled else None,
            near=interval.remark,
        ),
    )


def _evaluation_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of evaluations, whose intervals count steps."""
    interval_steps = train.evaluation.interval_steps
    return (
        row(
            "evaluation.interval_steps",
            "eval_strategy",
            "no" if interval_steps is None else "steps",
        ),
        row("steps between evaluations", "eval_steps", interval_steps),
    )


def _lost_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the abilities that the Trainer lacks, such as exact resuming and MFU."""
    return (
        row(
            "exact resume with another number of ranks",
            lost="skips as many micro-batches as were trained on",
        ),
        row("max_epochs", lost=remarks.max_epochs_remark(train, "run")),
        row("stop_after_s", lost=remarks.stop_remark(train)),
        row(
            "non-padding tokens/s and MFU of every step",
            lost="logs samples/s, padding included",
        ),
    )


def _parallel_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the parallel strategy, and the settings of FSDP."""
    fsdp_config: Value = None
    lost_hsdp: str | None = None
    if fsdp:
        fsdp_config = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "activation_checkpointing": train.activation_checkpointing != "none",
        }
        if train.parallel.shard_ranks is not None:
            lost_hsdp = remarks.HSDP
    return (
        row(
            "parallel.strategy",
            "fsdp",
            True if fsdp else None,
            near=remarks.weights_remark(train, fsdp=fsdp),
            lost=remarks.strategy_remark(train, fsdp=fsdp),
        ),
        row(
            "layers gathered one at a time",
            "fsdp_config",
            fsdp_config,
            near="other layers" if fsdp else None,
        ),
        row("parallel.shard_ranks", lost=lost_hsdp),
    )


def _gradient_rows(
    train: TrainConfig, ranks: int, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of gradients, which are lost, and the timeout."""
    parallel = train.parallel
    lost_view: str | None = None
    if parallel.gradient_as_bucket_view and ranks > 1 and not fsdp:
        lost_view = "stores gradients twice, in DDP's buckets and outside"
    return (
        row(
            "parallel.gradient_dtype",
            lost=remarks.gradient_dtype_remark(train, fsdp=fsdp),
        ),
        row("parallel.gradient_as_bucket_view", lost=lost_view),
        row(
            "parallel.timeout_s",
            "ddp_timeout",
            math.ceil(parallel.timeout_s),
            near="kills the process after the timeout",
        ),
    )
