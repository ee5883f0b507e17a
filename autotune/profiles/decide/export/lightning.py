"""Export of a profile to arguments of Lightning 2.6's ``Trainer``. Pure.

The export has code for the settings that your program passes to other functions.
"""

import math

from autotune.evidence.profile import Profile
from autotune.profiles.decide.export import remarks
from autotune.profiles.decide.export.ddp import ddp_names, gradient_rows
from autotune.profiles.decide.export.program import PROGRAM_NAMES, program_rows
from autotune.profiles.decide.export.shared import shared_rows
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Raw,
    Value,
    row,
)
from autotune.profiles.decide.export.unexpressed import unexpressed_rows
from trainer.config.train_config import TrainConfig

WRITTEN_FOR = "lightning 2.6 and transformers 5.23"
"""Versions of the libraries whose names the export has."""
_FIND_LAYERS = (
    "layers = [one for one in model.modules() if isinstance(one,"
    " GradientCheckpointingLayer)]"
)
"""Code that finds the layers of a model, which are compiled or sharded one by one."""
CALLS = {
    "compile": f"{_FIND_LAYERS}\nfor layer in layers: layer.compile({{}})",
    "schedules": (
        'schedules = [{"scheduler": schedule, "interval": "step"}]'
        "  # configure_optimizers() returns [optimizer], schedules"
    ),
    "clip_grad_norm_": (
        "self.trainer.model.clip_grad_norm_({})  # in configure_gradient_clipping()"
    ),
    "DDPStrategy": "strategy = DDPStrategy({})",
    "FSDPStrategy": (
        f"{_FIND_LAYERS}\nkinds = set(map(type, layers))\nstrategy = FSDPStrategy({{}})"
    ),
    "ModelCheckpoint": "checkpoint = ModelCheckpoint({})",
    "Trainer": (
        "trainer = Trainer(**(arguments | dict({})))  # arguments: those of the file"
    ),
}
"""Code of the program, by function; ``{}`` stands for its arguments."""
_CHECKPOINT = "ModelCheckpoint"
"""Function of ``CALLS`` that takes the settings of checkpoints."""
NAMES = {
    **PROGRAM_NAMES,
    "global_batch_size": "accumulate_grad_batches",
    "max_steps": "max_steps",
    "max_grad_norm": "gradient_clip_val",
    "seed": "seed_everything(seed)",
    "checkpoint.keep_last": f"{_CHECKPOINT}(save_top_k)",
    **ddp_names("DDPStrategy({})"),
}
"""Name of each shared setting: of the file, or ``function(argument)`` of the code."""


def settings(
    profile: Profile, batch: ExportedBatch, nodes: int
) -> tuple[Equivalent, ...]:
    """Return every setting, with its place in the file or the code, or what is lost.

    Args:
        profile: Profile to export.
        batch: Optimizer step of the profile and of the export.
        nodes: Nodes that train.
    """
    train = profile.train
    # Lightning rejects FSDP on CPUs.
    fsdp = train.parallel.strategy == "fsdp2" and train.device == "cuda"
    names = dict(NAMES)
    if fsdp:
        # Lightning's FSDP does not clip by norm, so the module does.
        names["max_grad_norm"] = "clip_grad_norm_(max_norm)"
    rows = (
        *unexpressed_rows(train),
        *program_rows(train, fsdp=fsdp),
        *shared_rows(profile, batch, names, fsdp=fsdp),
        *_step_rows(train),
        *_evaluation_rows(train, batch),
        *_run_rows(train),
        *_checkpoint_rows(train),
        row(
            "exact resume with another number of ranks",
            lost="does not restore the position in the data",
        ),
        row("non-padding tokens/s and MFU of every step", lost="not logged"),
        *_parallel_rows(train, batch.ranks, nodes, fsdp=fsdp),
    )
    if batch.ranks == 1 and not fsdp:
        return tuple(map(_without_ddp, rows))
    return rows


def _without_ddp(equivalent: Equivalent) -> Equivalent:
    """Return a row for a single process, which takes no arguments of DDP."""
    if equivalent.argument is not None and "DDPStrategy(" in equivalent.argument:
        return row(equivalent.setting)
    return equivalent


def _step_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of device, arithmetic and the end of training."""
    max_time: Value = None
    stop_remark: str | None = None
    if train.stop_after_s is not None:
        stop_remark = "counts from the start of training, and ends it in success"
        max_time = {"seconds": math.floor(train.stop_after_s)}
    return (
        row("device", "accelerator", "gpu" if train.device == "cuda" else "cpu"),
        row(
            "precision",
            "precision",
            "bf16-mixed" if train.precision == "bf16" else "32-true",
        ),
        row("compile", "compile(dynamic)", True if train.compiled else None),
        row(
            "compile_mode",
            "compile(mode)",
            train.compile_mode if train.compiled else None,
        ),
        row("max_epochs", "max_epochs", train.max_epochs),
        row("stop_after_s", "max_time", max_time, near=stop_remark),
    )


def _evaluation_rows(
    train: TrainConfig, batch: ExportedBatch
) -> tuple[Equivalent, ...]:
    """Return the settings of evaluations, whose intervals count micro-batches there."""
    interval_steps = train.evaluation.interval_steps
    no_sanity_check = row("no evaluation before training", "num_sanity_val_steps", 0)
    if interval_steps is None:
        return (
            row(
                "evaluation.interval_steps",
                "val_check_interval",
                near="the final model is not evaluated",
            ),
            row("intervals count over epochs", "Trainer(check_val_every_n_epoch)"),
            # Lightning evaluates by default; a limit of 0 batches turns it off.
            row("evaluation.max_sequences", "limit_val_batches", 0),
            no_sanity_check,
        )
    sequences_per_batch = batch.per_device_batch_size * batch.ranks
    return (
        row(
            "evaluation.interval_steps",
            "val_check_interval",
            interval_steps * batch.gradient_accumulation_steps,
        ),
        row(
            "intervals count over epochs",
            "Trainer(check_val_every_n_epoch)",
            Raw("None"),
        ),
        row(
            "evaluation.max_sequences",
            "limit_val_batches",
            math.ceil(train.evaluation.max_sequences / sequences_per_batch),
            near="other masks",
        ),
        no_sanity_check,
    )


def _run_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of logs and of the run directory."""
    loggers = None
    if train.log_to:
        loggers = "your program passes loggers: Trainer(logger=[...])"
    return (
        row("log_interval_steps", "log_every_n_steps", train.logged_steps),
        row("log_to", lost=loggers),
        row(
            "run directory",
            "default_root_dir",
            f"runs/lightning-{train.model.name}",
            near=remarks.NO_RECORD,
        ),
    )


def _checkpoint_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of checkpoints, which a callback writes by time."""
    checkpoint = train.checkpoint
    is_enabled = checkpoint.enabled
    interval = Raw(f"timedelta(seconds={checkpoint.interval_s:g})")
    interval_remark: str | None = None
    if is_enabled and checkpoint.interval_steps is not None:
        interval_remark = f"not every {checkpoint.interval_steps} steps as well"
    return (
        row("checkpoint.enabled", "enable_checkpointing", is_enabled),
        row(
            "checkpoints by a callback",
            "Trainer(callbacks)",
            Raw("[checkpoint]") if is_enabled else None,
        ),
        row(
            "checkpoint.interval_s",
            f"{_CHECKPOINT}(train_time_interval)",
            interval if is_enabled else None,
            near=interval_remark,
        ),
        row(
            "the newest checkpoints are kept",
            f"{_CHECKPOINT}(monitor)",
            "step" if is_enabled else None,
        ),
        row(
            "the newest is the one of the highest step",
            f"{_CHECKPOINT}(mode)",
            "max" if is_enabled else None,
        ),
    )


def _parallel_rows(
    train: TrainConfig, ranks: int, nodes: int, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the processes, the parallel strategy, and the arguments of its class."""
    strategy_class = "DDPStrategy"
    strategy = "ddp" if ranks > 1 else "auto"
    fsdp_remark: str | None = None
    if fsdp:
        strategy_class = "FSDPStrategy"
        strategy = "fsdp"
        fsdp_remark = (
            "FSDP1, which with bf16 gathers weights and reduces gradients in bf16"
        )
    return (
        row("ranks", "devices", ranks // nodes),
        row("nodes", "num_nodes", nodes),
        row(
            "parallel.strategy",
            "strategy",
            strategy,
            near=fsdp_remark,
            lost=remarks.strategy_remark(train, fsdp=fsdp),
        ),
        row(
            "arguments of the strategy",
            "Trainer(strategy)",
            None if strategy == "auto" else Raw("strategy"),
        ),
        *_fsdp_rows(train, ranks, strategy_class, fsdp=fsdp),
        *gradient_rows(
            train,
            call=strategy_class,
            hook_argument="ddp_comm_hook",
            hook_code=f"default_hooks.{train.parallel.gradient_dtype}_compress_hook",
            fsdp=fsdp,
        ),
        row(
            "parallel.timeout_s",
            f"{strategy_class}(timeout)",
            Raw(f"timedelta(seconds={train.parallel.timeout_s:g})"),
            near=remarks.KILLS_AFTER_TIMEOUT,
        ),
    )


def _fsdp_rows(
    train: TrainConfig, ranks: int, strategy_class: str, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of FSDP: its layers, and its copies of the weights."""
    has_checkpointing = fsdp and train.activation_checkpointing != "none"
    shard_ranks = train.parallel.shard_ranks
    sharding: Value = None
    mesh: Value = None
    lost_hsdp: str | None = None
    if fsdp and shard_ranks is not None:
        if ranks % shard_ranks == 0:
            sharding = "HYBRID_SHARD"
            mesh = Raw((ranks // shard_ranks, shard_ranks))
        else:
            lost_hsdp = remarks.HSDP
    return (
        row(
            "layers gathered one at a time",
            f"{strategy_class}(auto_wrap_policy)",
            Raw("kinds") if fsdp else None,
        ),
        row(
            "layers that are checkpointed",
            f"{strategy_class}(activation_checkpointing_policy)",
            Raw("kinds") if has_checkpointing else None,
        ),
        row("copies of the weights", f"{strategy_class}(sharding_strategy)", sharding),
        row(
            "parallel.shard_ranks",
            f"{strategy_class}(device_mesh)",
            mesh,
            lost=lost_hsdp,
        ),
    )
