"""Export of a profile to arguments of Lightning 2.6's ``Trainer``, and code for the module around it. Pure."""

import math

from autotune.profiles.decide.export import program
from autotune.profiles.decide.export.table import Equivalent, ExportedBatch, Raw, row
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig

WRITTEN_FOR = "lightning 2.6 and transformers 5.23"
_LAYERS = (
    "layers = [one for one in model.modules() if isinstance(one,"
    " GradientCheckpointingLayer)]"
)
CALLS = {
    "compile": f"{_LAYERS}\nfor layer in layers: layer.compile({{}})",
    "schedules": (
        'schedules = [{"scheduler": schedule, "interval": "step"}]'
        "  # configure_optimizers() returns [optimizer], schedules"
    ),
    "clip_grad_norm_": (
        "self.trainer.model.clip_grad_norm_({})  # in configure_gradient_clipping()"
    ),
    "DDPStrategy": "strategy = DDPStrategy({})",
    "FSDPStrategy": (
        f"{_LAYERS}\nkinds = set(map(type, layers))\nstrategy = FSDPStrategy({{}})"
    ),
    "ModelCheckpoint": "checkpoint = ModelCheckpoint({})",
    "Trainer": (
        "trainer = Trainer(**(arguments | dict({})))  # arguments: those of the file"
    ),
}
_SAVE = "ModelCheckpoint"
NAMES = {
    **program.PROGRAM_NAMES,
    "global_batch_size": "accumulate_grad_batches",
    "max_steps": "max_steps",
    "max_grad_norm": "gradient_clip_val",
    "seed": "seed_everything(seed)",
    "checkpoint.keep_last": f"{_SAVE}(save_top_k)",
    **program.ddp_names("DDPStrategy({})"),
}


def settings(
    profile: Profile, batch: ExportedBatch, nodes: int
) -> tuple[Equivalent, ...]:
    """Return the settings that its arguments or the module express, and those that it lacks."""
    train = profile.train
    # It rejects FSDP on CPUs.
    fsdp = train.parallel.strategy == "fsdp2" and train.device == "cuda"
    # Its FSDP clips no norms.
    names = NAMES | ({"max_grad_norm": "clip_grad_norm_(max_norm)"} if fsdp else {})
    rows = (
        *program.unexpressed_rows(train),
        *program.program_rows(train, fsdp=fsdp),
        *program.shared_rows(profile, batch, names, fsdp=fsdp),
        *_training(train, batch),
        *_parallel(train, batch.ranks, nodes, fsdp=fsdp),
    )
    alone = batch.ranks == 1 and not fsdp
    return tuple(
        row(one.setting) if alone and "DDPStrategy(" in (one.argument or "") else one
        for one in rows
    )


def _training(train: TrainConfig, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    """Return the settings of steps, checkpoints and evaluations, whose intervals count micro-batches there."""
    compiles, interval, limit = (
        train.compiled,
        train.evaluation.interval_steps,
        train.stop_after_s,
    )
    evaluated = math.ceil(
        train.evaluation.max_sequences / (batch.per_device_batch_size * batch.ranks)
    )
    saving, on, steps = (
        train.checkpoint,
        train.checkpoint.enabled,
        batch.gradient_accumulation_steps,
    )
    time = Raw(f"timedelta(seconds={saving.interval_s:g})")
    also = (
        on
        and saving.interval_steps is not None
        and f"not every {saving.interval_steps} steps as well"
    )
    return (
        row("device", "accelerator", "gpu" if train.device == "cuda" else "cpu"),
        row(
            "precision",
            "precision",
            "bf16-mixed" if train.precision == "bf16" else "32-true",
        ),
        row("compile", "compile(dynamic)", True if compiles else None),
        row("compile_mode", "compile(mode)", train.compile_mode if compiles else None),
        row("max_epochs", "max_epochs", train.max_epochs),
        row(
            "stop_after_s",
            "max_time",
            {"seconds": math.floor(limit)} if limit else None,
            near=limit is not None
            and "counts from the start of training, and ends it in success",
        ),
        row(
            "evaluation.interval_steps",
            "val_check_interval",
            interval and interval * steps,
            near=interval is None and "the final model is not evaluated",
        ),
        row(
            "intervals count over epochs",
            "Trainer(check_val_every_n_epoch)",
            Raw("None") if interval else None,
        ),
        row(
            "evaluation.max_sequences",
            "limit_val_batches",
            evaluated if interval else 0,
            near=interval is not None and "other masks",
        ),
        row("no evaluation before training", "num_sanity_val_steps", 0),
        row("log_interval_steps", "log_every_n_steps", train.logged_steps),
        row(
            "log_to",
            lost=bool(train.log_to)
            and "your program passes loggers: Trainer(logger=[...])",
        ),
        row(
            "run directory",
            "default_root_dir",
            f"runs/lightning-{train.model.name}",
            near=program.NO_RECORD,
        ),
        row("checkpoint.enabled", "enable_checkpointing", on),
        row(
            "checkpoints by a callback",
            "Trainer(callbacks)",
            Raw("[checkpoint]") if on else None,
        ),
        row(
            "checkpoint.interval_s",
            f"{_SAVE}(train_time_interval)",
            time if on else None,
            near=also,
        ),
        row(
            "the newest checkpoints are kept",
            f"{_SAVE}(monitor)",
            "step" if on else None,
        ),
        row(
            "the newest is the one of the highest step",
            f"{_SAVE}(mode)",
            "max" if on else None,
        ),
        row(
            "exact resume with another number of ranks",
            lost="does not restore the position in the data",
        ),
        row("non-padding tokens/s and MFU of every step", lost="not logged"),
    )


def _parallel(
    train: TrainConfig, ranks: int, nodes: int, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    shared, kinds, call = (
        train.parallel.shard_ranks,
        Raw("kinds"),
        "FSDPStrategy" if fsdp else "DDPStrategy",
    )
    many, hybrid = (
        fsdp or ranks > 1,
        fsdp and shared is not None and ranks % shared == 0,
    )
    timeout = f"timedelta(seconds={train.parallel.timeout_s:g})"
    again, dtype = (
        fsdp and train.activation_checkpointing != "none",
        train.parallel.gradient_dtype,
    )
    return (
        row("ranks", "devices", ranks // nodes),
        row("nodes", "num_nodes", nodes),
        row(
            "parallel.strategy",
            "strategy",
            "fsdp" if fsdp else "ddp" if many else "auto",
            near=fsdp
            and "FSDP1, which with bf16 gathers weights and reduces gradients in bf16",
            lost=program.remarks(train, fsdp=fsdp)["parallel.strategy"],
        ),
        row(
            "arguments of the strategy",
            "Trainer(strategy)",
            Raw("strategy") if many else None,
        ),
        row(
            "layers gathered one at a time",
            f"{call}(auto_wrap_policy)",
            kinds if fsdp else None,
        ),
        row(
            "layers that are checkpointed",
            f"{call}(activation_checkpointing_policy)",
            kinds if again else None,
        ),
        row(
            "copies of the weights",
            f"{call}(sharding_strategy)",
            "HYBRID_SHARD" if hybrid else None,
        ),
        row(
            "parallel.shard_ranks",
            f"{call}(device_mesh)",
            Raw((ranks // (shared or 1), shared)) if hybrid else None,
            lost=fsdp and shared is not None and not hybrid and program.HSDP,
        ),
        *program.hooked_rows(
            train,
            call,
            "ddp_comm_hook",
            f"default_hooks.{dtype}_compress_hook",
            fsdp=fsdp,
        ),
        row(
            "parallel.timeout_s",
            f"{call}(timeout)",
            Raw(timeout),
            near="kills the process after it",
        ),
    )
