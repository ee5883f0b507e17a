"""Remarks on settings that differ in several targets in the same way. Pure.

Each function returns None if its remark does not apply. ``fsdp`` is True if the target
trains with FSDP.
"""

from trainer.config.train_config import TrainConfig

NO_RECORD = "without run record, steps and events"
"""Remark on the run directory, whose files are those of the target."""
OTHER_ORDER = "a different permutation of each epoch"
"""Remark on the order of the data, which each trainer draws in its own way."""
HSDP = "HSDP: all ranks share one copy of the weights"
"""Remark on shards over some of the ranks, if the target shards over all."""
KILLS_AFTER_TIMEOUT = "kills the process after it"
"""Remark on the timeout that the code passes to the process group."""


def activation_checkpointing_remark(train: TrainConfig) -> str | None:
    """Return the difference from selective activation checkpointing."""
    if train.activation_checkpointing == "selective":
        return "recomputes matmuls as well"
    return None


def layout_remark(train: TrainConfig) -> str | None:
    """Return what happens instead of packing."""
    if train.layout == "packed":
        return (
            "packing would allow cross-document attention: one padded sample per"
            " sequence"
        )
    return None


def strategy_remark(train: TrainConfig, *, fsdp: bool) -> str | None:
    """Return what happens instead of a parallel strategy that the target lacks."""
    if train.parallel.strategy != "ddp" and not fsdp:
        return "plain DDP: every rank holds the whole optimizer state"
    return None


def gradient_dtype_remark(train: TrainConfig, *, fsdp: bool) -> str | None:
    """Return how a target without a hook to compress gradients sends them."""
    dtype = train.parallel.gradient_dtype
    # With bf16, FSDP reduces gradients in bf16, whatever the profile has.
    if fsdp and train.precision == "bf16":
        if dtype != "bf16":
            return "synchronises gradients in bf16, as bf16 is on"
    elif dtype != "fp32":
        return "synchronises gradients in fp32: twice the bytes"
    return None


def weights_remark(train: TrainConfig, *, fsdp: bool) -> str | None:
    """Return the precision in which FSDP communicates."""
    if fsdp and train.precision == "bf16":
        return "with bf16 it gathers weights and reduces gradients in bf16"
    return None


def stop_remark(train: TrainConfig) -> str | None:
    """Return what happens instead of an end at the time limit."""
    if train.stop_after_s is not None:
        return "does not save and exit before the time limit"
    return None


def max_epochs_remark(train: TrainConfig, loop_or_run: str) -> str | None:
    """Return what happens instead of an end after a number of epochs.

    Args:
        train: Settings to export.
        loop_or_run: Word for what ends: ``loop`` of your program, or ``run``.
    """
    if train.max_epochs is not None:
        return f"only max_steps ends the {loop_or_run}"
    return None
