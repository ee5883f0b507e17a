"""Export of a profile to transformers 5.23's ``TrainingArguments``, and the settings without equivalent. Pure."""

import math

from autotune.profiles.decide.export import program
from autotune.profiles.decide.export.batch import checkpoint_steps
from autotune.profiles.decide.export.table import Equivalent, ExportedBatch, Scalar, row
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig

WRITTEN_FOR = "transformers 5.23"
CALLS: dict[str, str] = {}
_NAMES = {
    **{one: one for one in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "max_steps")},
    **{one: one for one in ("warmup_steps", "seed")}, "schedule": "lr_scheduler_type",
    "final_learning_rate_share": "lr_scheduler_kwargs", "micro_batch_size": "per_device_train_batch_size",
    "global_batch_size": "gradient_accumulation_steps", "data.num_workers": "dataloader_num_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor", "data.pin_memory": "dataloader_pin_memory",
    "workers persist over epochs": "dataloader_persistent_workers", "checkpoint.keep_last": "save_total_limit",
    "parallel.bucket_cap_mib": "ddp_bucket_cap_mb", "parallel.static_graph": "ddp_static_graph",
    "every parameter is used": "ddp_find_unused_parameters", "no synchronisation of buffers": "ddp_broadcast_buffers",
}  # fmt: skip


def settings(profile: Profile, batch: ExportedBatch, _nodes: int) -> tuple[Equivalent, ...]:
    """Return the settings that its arguments express, and those that it lacks."""
    train = profile.train
    shared = program.shared_rows(profile, batch, _NAMES, fsdp=train.parallel.strategy == "fsdp2")
    own = (*_model(train, batch), *_training(profile, batch), *_parallel(train, batch.ranks))
    return (*program.unexpressed_rows(train), *shared, *own)


def _model(train: TrainConfig, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    on_gpu, fsdp = train.device == "cuda", train.parallel.strategy == "fsdp2"
    compiles, again = train.compiled, train.activation_checkpointing != "none" and not fsdp
    bucketed, each = train.layout == "bucketed", batch.per_device_batch_size
    return (
        row("device", "use_cpu", not on_gpu),
        row("precision", "bf16", train.precision == "bf16"),
        row("tf32", "tf32", train.tf32 if on_gpu and train.precision == "fp32" else None),
        row("compile", "torch_compile", compiles, near=compiles and "compiles the whole model at once"),
        row("compile_mode", "torch_compile_mode", train.compile_mode if compiles else None),
        row("activation_checkpointing", "gradient_checkpointing", again or None, near=program.recomputes(train)),
        row("run directory", "output_dir", f"runs/hf-{train.model.name}", near="without run record, steps and events"),
        row("evaluation.max_sequences", "per_device_eval_batch_size", each, near="the whole dataset, other masks"),
        row("layout", "train_sampling_strategy", "group_by_length" if bucketed else None,
            near=bucketed and "groups samples of similar length within 50 batches: steps are not independent draws",
            lost=program.unpacked(train)),
    )  # fmt: skip


def _training(profile: Profile, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    """Return the rest of the recipe, checkpoints and evaluations."""
    train, on, interval = profile.train, profile.train.checkpoint.enabled, profile.train.evaluation.interval_steps
    every, how = checkpoint_steps(profile, batch)
    return (
        row("adam_beta1", "adam_beta1", train.adam_beta1),
        row("adam_beta2", "adam_beta2", train.adam_beta2),
        row("fused AdamW", "optim", "adamw_torch_fused"),
        row("log_interval_steps", "logging_steps", train.logged_steps),
        row("log_to", "report_to", [*train.log_to] if train.log_to else None),
        row("losses that are not finite are logged", "logging_nan_inf_filter", False),
        row("order of the data", "data_seed", train.seed, near="a different permutation of each epoch"),
        row("checkpoint.enabled", "save_strategy", "steps" if on else "no"),
        row("checkpoint.interval_s", "save_steps", every if on else None, near=how),
        row("evaluation.interval_steps", "eval_strategy", "no" if interval is None else "steps"),
        row("steps between evaluations", "eval_steps", interval),
        row("exact resume with another number of ranks", lost="skips as many micro-batches as were trained on"),
        row("max_epochs", lost=train.max_epochs is not None and "only max_steps ends the run"),
        row("stop_after_s", lost=train.stop_after_s is not None and "does not save and exit before the time limit"),
        row("non-padding tokens/s and MFU of every step", lost="logs samples/s, padding included"),
    )


def _parallel(train: TrainConfig, ranks: int) -> tuple[Equivalent, ...]:
    settings, fsdp, bf16 = train.parallel, train.parallel.strategy == "fsdp2", train.precision == "bf16"
    timeout = math.ceil(settings.timeout_s)
    config: dict[str, Scalar] = {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": train.activation_checkpointing != "none",
    }  # fmt: skip
    twice = settings.gradient_as_bucket_view and ranks > 1 and not fsdp
    hybrid = fsdp and settings.shard_ranks is not None
    return (
        row("parallel.strategy", "fsdp", True if fsdp else None,
            near=fsdp and bf16 and "with bf16 it gathers weights and reduces gradients in bf16",
            lost=program.plain_ddp(train, fsdp=fsdp)),
        row("layers gathered one at a time", "fsdp_config", config if fsdp else None, near=fsdp and "other layers"),
        row("parallel.shard_ranks", lost=hybrid and "HSDP: all ranks share one copy of the weights"),
        row("parallel.gradient_dtype", lost=program.gradients_differ(train, fsdp=fsdp)),
        row("parallel.gradient_as_bucket_view", lost=twice and "stores gradients twice, in DDP's buckets and outside"),
        row("parallel.timeout_s", "ddp_timeout", timeout, near="kills the process after the timeout"),
    )  # fmt: skip
