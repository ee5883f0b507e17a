"""Export of a profile to transformers 5.23's ``TrainingArguments``, and the settings without equivalent. Pure."""

import math

from autotune.profiles.decide.export import program
from autotune.profiles.decide.export.table import Equivalent, ExportedBatch, Scalar, row
from autotune.profiles.values import Profile

WRITTEN_FOR = "transformers 5.23"
CALLS: dict[str, str] = {}
NAMES = {
    **{
        one: one
        for one in (
            "learning_rate",
            "weight_decay",
            "adam_epsilon",
            "max_grad_norm",
            "max_steps",
        )
    },
    **{one: one for one in ("warmup_steps", "seed")},
    "schedule": "lr_scheduler_type",
    "final_learning_rate_share": "lr_scheduler_kwargs",
    "micro_batch_size": "per_device_train_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
    "data.num_workers": "dataloader_num_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "workers persist over epochs": "dataloader_persistent_workers",
    "checkpoint.keep_last": "save_total_limit",
    **program.ddp_names("ddp_{}"),
}


def settings(
    profile: Profile, batch: ExportedBatch, _nodes: int
) -> tuple[Equivalent, ...]:
    """Return the settings that its arguments express, and those that it lacks."""
    train, saves, interval = (
        profile.train,
        profile.train.checkpoint.enabled,
        profile.train.evaluation.interval_steps,
    )
    on_gpu, compiles, parallel = train.device == "cuda", train.compiled, train.parallel
    fsdp, again = parallel.strategy == "fsdp2", train.activation_checkpointing != "none"
    bucketed, said = train.layout == "bucketed", program.remarks(train, fsdp=fsdp)
    every, how = program.checkpoint_steps(profile, batch)
    config: dict[str, Scalar] = {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": again,
    }
    twice = parallel.gradient_as_bucket_view and batch.ranks > 1 and not fsdp
    hybrid = fsdp and parallel.shard_ranks is not None
    return (
        *program.unexpressed_rows(train),
        *program.shared_rows(profile, batch, NAMES, fsdp=fsdp),
        row("device", "use_cpu", not on_gpu),
        row("precision", "bf16", train.precision == "bf16"),
        row(
            "tf32", "tf32", train.tf32 if on_gpu and train.precision == "fp32" else None
        ),
        row(
            "compile",
            "torch_compile",
            compiles,
            near=compiles and "compiles the whole model at once",
        ),
        row(
            "compile_mode",
            "torch_compile_mode",
            train.compile_mode if compiles else None,
        ),
        row(
            "activation_checkpointing",
            "gradient_checkpointing",
            (again and not fsdp) or None,
            near=said["activation_checkpointing"],
        ),
        row(
            "run directory",
            "output_dir",
            f"runs/hf-{train.model.name}",
            near=program.NO_RECORD,
        ),
        row(
            "evaluation.max_sequences",
            "per_device_eval_batch_size",
            batch.per_device_batch_size,
            near="the whole dataset, other masks",
        ),
        row(
            "layout",
            "train_sampling_strategy",
            "group_by_length" if bucketed else None,
            lost=said["layout"],
            near=bucketed
            and "groups samples of similar length within 50 batches: steps are not independent draws",
        ),
        *(row(one, one, getattr(train, one)) for one in ("adam_beta1", "adam_beta2")),
        row("fused AdamW", "optim", "adamw_torch_fused"),
        row("log_interval_steps", "logging_steps", train.logged_steps),
        row("log_to", "report_to", [*train.log_to] if train.log_to else None),
        row("losses that are not finite are logged", "logging_nan_inf_filter", False),
        row("order of the data", "data_seed", train.seed, near=program.OTHER_ORDER),
        row("checkpoint.enabled", "save_strategy", "steps" if saves else "no"),
        row("checkpoint.interval_s", "save_steps", every if saves else None, near=how),
        row(
            "evaluation.interval_steps",
            "eval_strategy",
            "no" if interval is None else "steps",
        ),
        row("steps between evaluations", "eval_steps", interval),
        row(
            "exact resume with another number of ranks",
            lost="skips as many micro-batches as were trained on",
        ),
        row(
            "max_epochs",
            lost=train.max_epochs is not None and "only max_steps ends the run",
        ),
        row("stop_after_s", lost=said["stop_after_s"]),
        row(
            "non-padding tokens/s and MFU of every step",
            lost="logs samples/s, padding included",
        ),
        row(
            "parallel.strategy",
            "fsdp",
            True if fsdp else None,
            near=said["weights"],
            lost=said["parallel.strategy"],
        ),
        row(
            "layers gathered one at a time",
            "fsdp_config",
            config if fsdp else None,
            near=fsdp and "other layers",
        ),
        row("parallel.shard_ranks", lost=hybrid and program.HSDP),
        row("parallel.gradient_dtype", lost=said["parallel.gradient_dtype"]),
        row(
            "parallel.gradient_as_bucket_view",
            lost=twice and "stores gradients twice, in DDP's buckets and outside",
        ),
        row(
            "parallel.timeout_s",
            "ddp_timeout",
            math.ceil(parallel.timeout_s),
            near="kills the process after the timeout",
        ),
    )
