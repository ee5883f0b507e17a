"""Export to transformers 5.23's ``TrainingArguments``. Pure."""

import math

from autotune.subjects.mlm.export import batch, schedule, shared
from autotune.subjects.mlm.export.program import MODEL_CODE, MODEL_ROWS
from autotune.subjects.mlm.export.shared import only_if
from autotune.subjects.mlm.export.table import (
    ExportTarget,
    SettingRow,
)
from autotune.subjects.mlm.export.unexpressed import UNEXPRESSED_ROWS

TARGET = ExportTarget(
    written_for="transformers 5.23",
    fsdp_on_cpus=True,
    # The Trainer has its own loop.
    code=MODEL_CODE,
    rows=(
        *UNEXPRESSED_ROWS,
        *MODEL_ROWS,
        SettingRow(
            "micro_batch_size",
            "per_device_train_batch_size",
            shared.samples_per_micro_batch,
            near=shared.one_sample_remark,
        ),
        SettingRow(
            "global_batch_size",
            "gradient_accumulation_steps",
            shared.accumulation_steps,
            near=shared.whole_micro_batches_remark,
        ),
        SettingRow("learning_rate", "learning_rate"),
        SettingRow("weight_decay", "weight_decay"),
        SettingRow("adam_epsilon", "adam_epsilon"),
        SettingRow("max_steps", "max_steps"),
        SettingRow("max_grad_norm", "max_grad_norm"),
        SettingRow("schedule", "lr_scheduler_type", schedule.schedule_name),
        SettingRow(
            "final_learning_rate_share",
            "lr_scheduler_kwargs",
            schedule.schedule_arguments,
        ),
        SettingRow("warmup_steps", "warmup_steps", near=schedule.warm_up_remark),
        SettingRow("seed", "seed", near=shared.OTHER_DRAWS),
        SettingRow(
            "data.num_workers", "dataloader_num_workers", near=shared.workers_remark
        ),
        SettingRow(
            "data.prefetch_factor",
            "dataloader_prefetch_factor",
            shared.prefetch_factor,
        ),
        SettingRow("data.pin_memory", "dataloader_pin_memory", shared.pin_memory),
        SettingRow(
            "workers persist over epochs",
            "dataloader_persistent_workers",
            shared.persistent_workers,
        ),
        SettingRow("checkpoint.keep_last", "save_total_limit", shared.kept_checkpoints),
        *shared.ddp_rows("ddp_{}".format),
        SettingRow("device", "use_cpu", lambda run: not run.on_gpu),
        SettingRow("precision", "bf16", lambda run: run.has_bf16),
        SettingRow(
            "tf32",
            "tf32",
            lambda run: run.train.tf32 if run.on_gpu and not run.has_bf16 else None,
        ),
        SettingRow(
            "compile",
            "torch_compile",
            lambda run: run.train.compiled,
            near=only_if(
                lambda run: run.train.compiled, "compiles the whole model at once"
            ),
        ),
        SettingRow("compile_mode", "torch_compile_mode", shared.compile_mode),
        SettingRow(
            "activation_checkpointing",
            "gradient_checkpointing",
            only_if(lambda run: run.checkpoints_activations and not run.fsdp, True),
            near=shared.selective_remark,
        ),
        SettingRow(
            "run directory",
            "output_dir",
            lambda run: f"runs/hf-{run.train.model.name}",
            near=shared.NO_RECORD,
        ),
        SettingRow(
            "evaluation.max_sequences",
            "per_device_eval_batch_size",
            shared.samples_per_micro_batch,
            near="the whole dataset, other masks",
        ),
        SettingRow(
            "layout",
            "train_sampling_strategy",
            only_if(lambda run: run.train.layout == "bucketed", "group_by_length"),
            near=only_if(
                lambda run: run.train.layout == "bucketed",
                "groups samples of similar length within 50 batches: steps are not"
                " independent draws",
            ),
            lost=shared.padded_remark,
        ),
        SettingRow("adam_beta1", "adam_beta1"),
        SettingRow("adam_beta2", "adam_beta2"),
        SettingRow("fused AdamW", "optim", "adamw_torch_fused"),
        SettingRow(
            "log_interval_steps", "logging_steps", lambda run: run.train.logged_steps
        ),
        SettingRow("log_to", "report_to", shared.loggers),
        SettingRow(
            "losses that are not finite are logged", "logging_nan_inf_filter", False
        ),
        SettingRow(
            "order of the data",
            "data_seed",
            lambda run: run.train.seed,
            near=shared.OTHER_ORDER,
        ),
        SettingRow(
            "checkpoint.enabled",
            "save_strategy",
            lambda run: "steps" if run.train.checkpoint.enabled else "no",
        ),
        SettingRow(
            "checkpoint.interval_s",
            "save_steps",
            batch.steps_between_checkpoints,
            near=batch.checkpoint_interval_remark,
        ),
        SettingRow(
            "evaluation.interval_steps",
            "eval_strategy",
            lambda run: (
                "no" if run.train.evaluation.interval_steps is None else "steps"
            ),
        ),
        SettingRow(
            "steps between evaluations",
            "eval_steps",
            lambda run: run.train.evaluation.interval_steps,
        ),
        SettingRow(
            "exact resume with another number of ranks",
            lost="skips as many micro-batches as were trained on",
        ),
        SettingRow(
            "max_epochs",
            lost=only_if(
                lambda run: run.train.max_epochs is not None,
                "only max_steps ends the run",
            ),
        ),
        SettingRow("stop_after_s", lost=shared.no_time_limit_remark),
        SettingRow(
            "non-padding tokens/s and MFU of every step",
            lost="logs samples/s, padding included",
        ),
        SettingRow(
            "parallel.strategy",
            "fsdp",
            only_if(lambda run: run.fsdp, True),
            near=shared.bf16_weights_remark,
            lost=shared.plain_ddp_remark,
        ),
        shared.fsdp_row(""),
        SettingRow("parallel.shard_ranks", lost=shared.one_copy_remark),
        SettingRow("parallel.gradient_dtype", lost=shared.gradient_dtype_remark),
        SettingRow(
            "parallel.gradient_as_bucket_view",
            lost=only_if(
                lambda run: (
                    run.train.parallel.gradient_as_bucket_view
                    and run.ranks > 1
                    and not run.fsdp
                ),
                "stores gradients twice, in DDP's buckets and outside",
            ),
        ),
        SettingRow(
            "parallel.timeout_s",
            "ddp_timeout",
            lambda run: math.ceil(run.train.parallel.timeout_s),
            near="kills the process after the timeout",
        ),
    ),
)
"""Table of transformers' Trainer, which has its own training loop."""
