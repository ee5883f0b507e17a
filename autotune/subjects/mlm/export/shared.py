"""Values and remarks of rows that targets have in common. Pure."""

from collections.abc import Callable
from typing import TypeVar

from autotune.subjects.mlm.export.table import Raw, RunToExport, SettingRow, Value

NO_RECORD = "without run record, steps and events"
"""Remark on the run directory, whose files are those of the target."""
OTHER_ORDER = "a different permutation of each epoch"
"""Remark on the order of the data, which each trainer draws in its own way."""
OTHER_DRAWS = "the same seed gives other initial weights and dropout"
"""Remark on the seed."""
KILLS_AFTER_TIMEOUT = "kills the process after it"
"""Remark on the timeout that the code passes to the process group."""
_HSDP = "HSDP: all ranks share one copy of the weights"
_TORCH_BUCKET_CAP_MIB = 25
"""Bucket size of torch if none is given, which an export leaves out: only then does
torch make the first bucket smaller, so that it is sent early."""

ContentT = TypeVar("ContentT")
"""Type of a value or a remark."""


def only_if(
    condition: Callable[[RunToExport], bool], content: ContentT
) -> Callable[[RunToExport], ContentT | None]:
    """Return a value or remark of a row that only some runs have.

    Args:
        condition: Function that returns True for a run that has it.
        content: The value or remark.
    """
    return lambda run: content if condition(run) else None


# Optimizer step and loader.


def samples_per_micro_batch(run: RunToExport) -> int:
    """Return the micro-batch size in samples."""
    return run.batch.per_device_batch_size


def accumulation_steps(run: RunToExport) -> int:
    """Return the micro-batches of an optimizer step, which make the global batch."""
    return run.batch.gradient_accumulation_steps


one_sample_remark = only_if(
    lambda run: (
        run.train.layout == "packed"
        or run.batch.per_device_batch_size != run.train.micro_batch_size
    ),
    "one sample per sequence",
)
whole_micro_batches_remark = only_if(
    lambda run: (
        run.train.layout == "packed"
        or run.batch.exported_samples_per_step != run.batch.sequences_per_step
    ),
    "whole micro-batches only",
)
# They were measured with this project's input pipeline, which masks whole batches: the
# collator of an export is slower.
workers_remark = only_if(
    lambda run: run.profile.evidence.workers is not None, "requires more workers"
)


def prefetch_factor(run: RunToExport) -> int | None:
    """Return the prefetch factor, which torch rejects without workers."""
    data = run.train.data
    return data.prefetch_factor if data.num_workers > 0 else None


def pin_memory(run: RunToExport) -> bool:
    """Return whether batches are pinned: only on a GPU."""
    return run.on_gpu and run.train.data.pin_memory


# Torch rejects persistent workers without workers.
persistent_workers = only_if(lambda run: run.train.data.num_workers > 0, True)

# Model and layout.

selective_remark = only_if(
    lambda run: run.train.activation_checkpointing == "selective",
    "recomputes matmuls as well",
)
padded_remark = only_if(
    lambda run: run.train.layout == "packed",
    "packing would allow cross-document attention: one padded sample per sequence",
)


def compile_mode(run: RunToExport) -> str | None:
    """Return the mode of torch.compile; None if the run compiles nothing."""
    return run.train.compile_mode if run.train.compiled else None


def loggers(run: RunToExport) -> Value:
    """Return the loggers; None leaves them at the target's default."""
    return list(run.train.log_to or ()) or None


# Checkpoints and the end of a run.


def writes_checkpoints(run: RunToExport) -> bool:
    """Return whether the run writes checkpoints."""
    return run.train.checkpoint.enabled


def kept_checkpoints(run: RunToExport) -> int | None:
    """Return the number of checkpoints to keep; None without checkpoints."""
    checkpoint = run.train.checkpoint
    return checkpoint.keep_last if checkpoint.enabled else None


checkpoints_enabled = only_if(writes_checkpoints, True)
no_time_limit_remark = only_if(
    lambda run: run.train.stop_after_s is not None,
    "does not save and exit before the time limit",
)

# Parallel strategy and gradients.

plain_ddp_remark = only_if(
    lambda run: run.train.parallel.strategy != "ddp" and not run.fsdp,
    "plain DDP: every rank holds the whole optimizer state",
)
bf16_weights_remark = only_if(
    lambda run: run.fsdp and run.has_bf16,
    "with bf16 it gathers weights and reduces gradients in bf16",
)
other_layers_remark = only_if(lambda run: run.fsdp, "other layers")
one_copy_remark = only_if(
    lambda run: run.fsdp and run.train.parallel.shard_ranks is not None, _HSDP
)


def copies_of_weights(run: RunToExport) -> int | None:
    """Return the copies of the weights with HSDP.

    Returns:
        None without HSDP, or if a copy's ranks do not divide all ranks.
    """
    shard_ranks = run.train.parallel.shard_ranks
    if not run.fsdp or shard_ranks is None or run.ranks % shard_ranks:
        return None
    return run.ranks // shard_ranks


uneven_copies_remark = only_if(
    lambda run: one_copy_remark(run) is not None and copies_of_weights(run) is None,
    _HSDP,
)


def gradient_dtype_remark(run: RunToExport) -> str | None:
    """Return the dtype in which a target without a hook sends gradients."""
    dtype = run.train.parallel.gradient_dtype
    # With bf16, FSDP reduces gradients in bf16, whatever the profile has.
    if run.fsdp and run.has_bf16:
        if dtype != "bf16":
            return "synchronises gradients in bf16, as bf16 is on"
    elif dtype != "fp32":
        return "synchronises gradients in fp32: twice the bytes"
    return None


def fsdp_gradient_dtype_remark(run: RunToExport) -> str | None:
    """Return the remark on gradients of FSDP, which takes no hook."""
    return gradient_dtype_remark(run) if run.fsdp else None


def gradient_as_bucket_view(run: RunToExport) -> bool | None:
    """Return where DDP stores gradients; None with FSDP."""
    return None if run.fsdp else run.train.parallel.gradient_as_bucket_view


def bucket_cap_mib(run: RunToExport) -> int | None:
    """Return the size of DDP's buckets; None with FSDP or torch's size."""
    size_mib = run.train.parallel.bucket_cap_mib
    return None if run.fsdp or size_mib == _TORCH_BUCKET_CAP_MIB else size_mib


static_graph = only_if(
    lambda run: run.train.parallel.static_graph and not run.fsdp, True
)
# Always written: transformers looks for unused parameters by default, and DDP sends
# buffers by default.
turned_off_in_ddp = only_if(lambda run: not run.fsdp, False)


def ddp_rows(argument: Callable[[str], str]) -> tuple[SettingRow, ...]:
    """Return the rows of DDP that trainers of accelerate have in common.

    Args:
        argument: Function from the name of a setting to the argument that takes it:
            ``static_graph`` is ``ddp_static_graph`` for one trainer.
    """
    return (
        SettingRow(
            "parallel.bucket_cap_mib", argument("bucket_cap_mb"), bucket_cap_mib
        ),
        SettingRow("parallel.static_graph", argument("static_graph"), static_graph),
        SettingRow(
            "every parameter is used",
            argument("find_unused_parameters"),
            turned_off_in_ddp,
        ),
        SettingRow(
            "no synchronisation of buffers",
            argument("broadcast_buffers"),
            turned_off_in_ddp,
        ),
    )


def fsdp_row(prefix: str) -> SettingRow:
    """Return the row of FSDP that trainers of accelerate have in common.

    Args:
        prefix: Prefix of the names of its settings.
    """

    def config(run: RunToExport) -> Value:
        if not run.fsdp:
            return None
        settings: dict[str, str | int] = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # FSDP checkpoints activations itself.
            "activation_checkpointing": run.checkpoints_activations,
        }
        return {f"{prefix}{name}": value for name, value in settings.items()}

    return SettingRow(
        "layers gathered one at a time",
        "fsdp_config",
        config,
        near=other_layers_remark,
    )


def timeout(run: RunToExport) -> Raw:
    """Return the timeout as Python code."""
    return Raw(f"timedelta(seconds={run.train.parallel.timeout_s:g})")
