"""Export to arguments of Lightning 2.6's ``Trainer``. Pure.

The export has code for the settings that your program passes to other functions.
"""

import math
from collections.abc import Callable

from autotune.subjects.mlm.export import shared
from autotune.subjects.mlm.export.program import PROGRAM_CODE, PROGRAM_ROWS
from autotune.subjects.mlm.export.shared import only_if
from autotune.subjects.mlm.export.table import (
    ExportTarget,
    Raw,
    RunToExport,
    SettingRow,
    Value,
)
from autotune.subjects.mlm.export.unexpressed import UNEXPRESSED_ROWS

_FIND_LAYERS = (
    "layers = [one for one in model.modules() if isinstance(one,"
    " GradientCheckpointingLayer)]"
)
"""Code that finds the layers of a model, which are compiled or sharded one by one."""


def _uses_ddp(run: RunToExport) -> bool:
    """Return whether the run uses DDP: a single process takes no arguments of it."""
    return run.ranks > 1 and not run.fsdp


def _ddp(keyword: str) -> Callable[[RunToExport], str | None]:
    """Return the function of a row that names an argument of DDP."""
    return only_if(_uses_ddp, f"DDPStrategy({keyword})")


def _clipping_argument(run: RunToExport) -> str:
    """Return the argument of clipping: Lightning's FSDP leaves it to the module."""
    return "clip_grad_norm_(max_norm)" if run.fsdp else "gradient_clip_val"


def _strategy(run: RunToExport) -> str:
    """Return Lightning's name of the parallel strategy."""
    if run.fsdp:
        return "fsdp"
    return "ddp" if run.ranks > 1 else "auto"


def _timeout_argument(run: RunToExport) -> str | None:
    """Return the argument of the timeout; None for a single process."""
    if run.fsdp:
        return "FSDPStrategy(timeout)"
    return _ddp("timeout")(run)


def _gradient_hook(run: RunToExport) -> Value:
    """Return the hook that compresses gradients, as Python code; FSDP takes none."""
    dtype = run.train.parallel.gradient_dtype
    if dtype == "fp32":
        return None
    return Raw(f"default_hooks.{dtype}_compress_hook")


def _device_mesh(run: RunToExport) -> Value:
    """Return the copies of the weights and the ranks of each; None without HSDP."""
    copies = shared.copies_of_weights(run)
    if copies is None:
        return None
    return Raw((copies, run.train.parallel.shard_ranks))


def _max_time(run: RunToExport) -> Value:
    """Return the time limit; None without one."""
    limit_s = run.train.stop_after_s
    return None if limit_s is None else {"seconds": math.floor(limit_s)}


def _evaluates(run: RunToExport) -> bool:
    """Return whether the run evaluates while it trains."""
    return run.train.evaluation.interval_steps is not None


def _micro_batches_between_evaluations(run: RunToExport) -> int | None:
    """Return the interval between evaluations, which Lightning counts so."""
    interval_steps = run.train.evaluation.interval_steps
    if interval_steps is None:
        return None
    return interval_steps * run.batch.gradient_accumulation_steps


def _evaluation_batches(run: RunToExport) -> int:
    """Return the batches of an evaluation, of which 0 turn it off."""
    if not _evaluates(run):
        return 0
    samples_per_batch = run.batch.per_device_batch_size * run.ranks
    return math.ceil(run.train.evaluation.max_sequences / samples_per_batch)


def _checkpoint_interval(run: RunToExport) -> Value:
    """Return the time between checkpoints, as Python code; None without them."""
    checkpoint = run.train.checkpoint
    if not checkpoint.enabled:
        return None
    return Raw(f"timedelta(seconds={checkpoint.interval_s:g})")


def _checkpoint_interval_remark(run: RunToExport) -> str | None:
    """Return that an interval in steps is lost beside the one in seconds."""
    checkpoint = run.train.checkpoint
    if not checkpoint.enabled or checkpoint.interval_steps is None:
        return None
    return f"not every {checkpoint.interval_steps} steps as well"


TARGET = ExportTarget(
    written_for="lightning 2.6 and transformers 5.23",
    # Lightning rejects FSDP on CPUs.
    fsdp_on_cpus=False,
    code={
        **PROGRAM_CODE,
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
            f"{_FIND_LAYERS}\nkinds = set(map(type, layers))\n"
            "strategy = FSDPStrategy({})"
        ),
        "ModelCheckpoint": "checkpoint = ModelCheckpoint({})",
        "Trainer": (
            "trainer = Trainer(**(arguments | dict({})))"
            "  # arguments: those of the file"
        ),
    },
    rows=(
        *UNEXPRESSED_ROWS,
        *PROGRAM_ROWS,
        SettingRow(
            "global_batch_size",
            "accumulate_grad_batches",
            shared.accumulation_steps,
            near=shared.whole_micro_batches_remark,
        ),
        SettingRow("max_steps", "max_steps"),
        SettingRow("max_grad_norm", _clipping_argument),
        SettingRow("seed", "seed_everything(seed)", near=shared.OTHER_DRAWS),
        SettingRow(
            "parallel.bucket_cap_mib", _ddp("bucket_cap_mb"), shared.bucket_cap_mib
        ),
        SettingRow("parallel.static_graph", _ddp("static_graph"), shared.static_graph),
        SettingRow("every parameter is used", _ddp("find_unused_parameters"), False),
        SettingRow("no synchronisation of buffers", _ddp("broadcast_buffers"), False),
        SettingRow("device", "accelerator", lambda run: "gpu" if run.on_gpu else "cpu"),
        SettingRow(
            "precision",
            "precision",
            lambda run: "bf16-mixed" if run.has_bf16 else "32-true",
        ),
        SettingRow(
            "compile",
            "compile(dynamic)",
            only_if(lambda run: run.train.compiled, True),
        ),
        SettingRow("compile_mode", "compile(mode)", shared.compile_mode),
        SettingRow("max_epochs", "max_epochs"),
        SettingRow(
            "stop_after_s",
            "max_time",
            _max_time,
            near=only_if(
                lambda run: run.train.stop_after_s is not None,
                "counts from the start of training, and ends it in success",
            ),
        ),
        SettingRow(
            "evaluation.interval_steps",
            "val_check_interval",
            _micro_batches_between_evaluations,
            near=only_if(
                lambda run: not _evaluates(run), "the final model is not evaluated"
            ),
        ),
        SettingRow(
            "intervals count over epochs",
            "Trainer(check_val_every_n_epoch)",
            only_if(_evaluates, Raw("None")),
        ),
        SettingRow(
            "evaluation.max_sequences",
            "limit_val_batches",
            _evaluation_batches,
            near=only_if(_evaluates, "other masks"),
        ),
        SettingRow("no evaluation before training", "num_sanity_val_steps", 0),
        SettingRow(
            "log_interval_steps",
            "log_every_n_steps",
            lambda run: run.train.logged_steps,
        ),
        SettingRow(
            "log_to",
            lost=only_if(
                lambda run: bool(run.train.log_to),
                "your program passes loggers: Trainer(logger=[...])",
            ),
        ),
        SettingRow(
            "run directory",
            "default_root_dir",
            lambda run: f"runs/lightning-{run.train.model.name}",
            near=shared.NO_RECORD,
        ),
        SettingRow("checkpoint.enabled", "enable_checkpointing"),
        SettingRow(
            "checkpoints by a callback",
            "Trainer(callbacks)",
            only_if(shared.writes_checkpoints, Raw("[checkpoint]")),
        ),
        SettingRow(
            "checkpoint.keep_last",
            "ModelCheckpoint(save_top_k)",
            shared.kept_checkpoints,
        ),
        SettingRow(
            "checkpoint.interval_s",
            "ModelCheckpoint(train_time_interval)",
            _checkpoint_interval,
            near=_checkpoint_interval_remark,
        ),
        SettingRow(
            "the newest checkpoints are kept",
            "ModelCheckpoint(monitor)",
            only_if(shared.writes_checkpoints, "step"),
        ),
        SettingRow(
            "the newest is the one of the highest step",
            "ModelCheckpoint(mode)",
            only_if(shared.writes_checkpoints, "max"),
        ),
        SettingRow(
            "exact resume with another number of ranks",
            lost="does not restore the position in the data",
        ),
        SettingRow("non-padding tokens/s and MFU of every step", lost="not logged"),
        SettingRow("ranks", "devices", lambda run: run.ranks // run.nodes),
        SettingRow("nodes", "num_nodes", lambda run: run.nodes),
        SettingRow(
            "parallel.strategy",
            "strategy",
            _strategy,
            near=only_if(
                lambda run: run.fsdp,
                "FSDP1, which with bf16 gathers weights and reduces gradients in bf16",
            ),
            lost=shared.plain_ddp_remark,
        ),
        SettingRow(
            "arguments of the strategy",
            "Trainer(strategy)",
            only_if(lambda run: _strategy(run) != "auto", Raw("strategy")),
        ),
        SettingRow(
            "layers gathered one at a time",
            "FSDPStrategy(auto_wrap_policy)",
            only_if(lambda run: run.fsdp, Raw("kinds")),
        ),
        SettingRow(
            "layers that are checkpointed",
            "FSDPStrategy(activation_checkpointing_policy)",
            only_if(lambda run: run.fsdp and run.checkpoints_activations, Raw("kinds")),
        ),
        SettingRow(
            "copies of the weights",
            "FSDPStrategy(sharding_strategy)",
            only_if(
                lambda run: shared.copies_of_weights(run) is not None, "HYBRID_SHARD"
            ),
        ),
        SettingRow(
            "parallel.shard_ranks",
            "FSDPStrategy(device_mesh)",
            _device_mesh,
            lost=shared.uneven_copies_remark,
        ),
        SettingRow(
            "parallel.gradient_dtype",
            _ddp("ddp_comm_hook"),
            _gradient_hook,
            lost=shared.fsdp_gradient_dtype_remark,
        ),
        SettingRow("parallel.gradient_as_bucket_view", _ddp("gradient_as_bucket_view")),
        SettingRow(
            "parallel.timeout_s",
            _timeout_argument,
            shared.timeout,
            near=only_if(
                lambda run: _strategy(run) != "auto", shared.KILLS_AFTER_TIMEOUT
            ),
        ),
    ),
)
"""Table of Lightning's Trainer, whose loop is given its objects by a module."""
