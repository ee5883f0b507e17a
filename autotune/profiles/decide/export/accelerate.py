"""Export of a profile to a file for ``accelerate launch --config_file``. Pure.

The file cannot hold the settings of the training loop, which is your program's: the
export has code for them.
"""

from autotune.evidence.profile import Profile
from autotune.profiles.decide.export import remarks
from autotune.profiles.decide.export.batch import checkpoint_interval
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

WRITTEN_FOR = "accelerate 1.15 and transformers 5.23"
"""Versions of the libraries whose names the export has."""
CALLS = {
    "DistributedDataParallelKwargs": "ddp = DistributedDataParallelKwargs({})",
    "InitProcessGroupKwargs": "group = InitProcessGroupKwargs({})",
    "ProjectConfiguration": "project = ProjectConfiguration({})",
    "Accelerator": "accelerator = Accelerator(project_config=project, {})",
    "prepare": (
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  #"
        " not the schedule"
    ),
    "range": (
        "for step in range({}): ...  # with the lines below, for each optimizer step"
    ),
    "accumulate": (
        "with accelerator.accumulate(model): ...  # micro-batch: backward, clip as"
        " below, optimizer.step()"
    ),
    "clip_grad_norm_": (
        "if accelerator.sync_gradients:"
        " accelerator.clip_grad_norm_(model.parameters(), {})"
    ),
    "step": "if accelerator.sync_gradients: schedule.step()",
    "save_state": "if (step + 1) % {} == 0: accelerator.save_state()",
}
"""Code of the loop, by function; ``{}`` stands for its arguments."""
_DDP = "DistributedDataParallelKwargs"
"""Function of ``CALLS`` that takes the arguments of DDP."""
_PROJECT = "ProjectConfiguration"
"""Function of ``CALLS`` that takes the run directory and the checkpoints to keep."""
NAMES = {
    **PROGRAM_NAMES,
    "global_batch_size": "Accelerator(gradient_accumulation_steps)",
    "max_steps": "range()",
    "max_grad_norm": "clip_grad_norm_(max_norm)",
    "seed": "set_seed(seed)",
    "checkpoint.keep_last": f"{_PROJECT}(total_limit)",
    **ddp_names(f"{_DDP}({{}})"),
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
    # On CPUs, accelerate ignores FSDP.
    fsdp = train.parallel.strategy == "fsdp2" and train.device == "cuda"
    gradient_dtype = train.parallel.gradient_dtype.upper()
    return (
        *unexpressed_rows(train),
        *program_rows(train, fsdp=fsdp),
        *shared_rows(profile, batch, NAMES, fsdp=fsdp),
        row("launch", "compute_environment", "LOCAL_MACHINE"),
        *_fsdp_rows(train, batch.ranks, fsdp=fsdp),
        *_process_rows(train, batch.ranks, nodes, fsdp=fsdp),
        *_compile_rows(train),
        *gradient_rows(
            train,
            call=_DDP,
            hook_argument="comm_hook",
            hook_code=f"DDPCommunicationHookType.{gradient_dtype}",
            fsdp=fsdp,
        ),
        *_handler_rows(train, fsdp=fsdp),
        row(
            "run directory",
            f"{_PROJECT}(project_dir)",
            f"runs/accelerate-{train.model.name}",
            near=remarks.NO_RECORD,
        ),
        *_checkpoint_rows(profile, batch),
        *_loop_rows(train),
    )


def _distributed_type(train: TrainConfig, ranks: int, *, fsdp: bool) -> str:
    """Return accelerate's name of the parallel strategy and device."""
    if fsdp:
        return "FSDP"
    if ranks == 1:
        return "NO"
    return "MULTI_GPU" if train.device == "cuda" else "MULTI_CPU"


def _fsdp_rows(train: TrainConfig, ranks: int, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the parallel strategy, and the settings of FSDP."""
    fsdp_config: Value = None
    parallelism_config: Value = None
    lost_hsdp: str | None = None
    if fsdp:
        fsdp_config = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": train.activation_checkpointing != "none",
        }
        shard_ranks = train.parallel.shard_ranks
        if shard_ranks is not None and ranks % shard_ranks == 0:
            parallelism_config = {
                "parallelism_config_dp_replicate_size": ranks // shard_ranks,
                "parallelism_config_dp_shard_size": shard_ranks,
            }
        elif shard_ranks is not None:
            lost_hsdp = remarks.HSDP
    return (
        row(
            "parallel.strategy",
            "distributed_type",
            _distributed_type(train, ranks, fsdp=fsdp),
            lost=remarks.strategy_remark(train, fsdp=fsdp),
            near=remarks.weights_remark(train, fsdp=fsdp),
        ),
        row(
            "layers gathered one at a time",
            "fsdp_config",
            fsdp_config,
            near="other layers" if fsdp else None,
        ),
        row(
            "parallel.shard_ranks",
            "parallelism_config",
            parallelism_config,
            lost=lost_hsdp,
        ),
    )


def _process_rows(
    train: TrainConfig, ranks: int, nodes: int, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the device, its precision, and the processes to launch."""
    nodes_remark: str | None = None
    if nodes > 1:
        nodes_remark = (
            "pass --machine_rank, --main_process_ip and --main_process_port on each"
            " node"
        )
    processes_remark: str | None = None
    if _distributed_type(train, ranks, fsdp=fsdp) == "MULTI_CPU":
        processes_remark = (
            f"starts one process on CPUs: run mpirun -n {ranks} accelerate launch"
        )
    return (
        row("device", "use_cpu", train.device != "cuda"),
        row(
            "precision",
            "mixed_precision",
            "bf16" if train.precision == "bf16" else "no",
        ),
        row("nodes", "num_machines", nodes),
        row("rank of the node", "machine_rank", 0, near=nodes_remark),
        row("ranks", "num_processes", ranks, near=processes_remark),
    )


def _compile_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of torch.compile, which compiles each layer on its own."""
    dynamo_config: Value = None
    compile_remark: str | None = None
    if train.compiled:
        dynamo_config = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": train.compile_mode,
            "dynamo_use_regional_compilation": True,
            # Micro-batches are padded to their longest sample.
            "dynamo_use_dynamic": True,
        }
        compile_remark = "compiles the rest of the model as well"
    return (
        row("compile", "dynamo_config", dynamo_config, near=compile_remark),
        # Its value is in dynamo_config.
        row("compile_mode"),
    )


def _handler_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the timeout, and the list of handlers that the Accelerator takes."""
    return (
        row(
            "parallel.timeout_s",
            "InitProcessGroupKwargs(timeout)",
            Raw(f"timedelta(seconds={train.parallel.timeout_s:g})"),
            near=remarks.KILLS_AFTER_TIMEOUT,
        ),
        row(
            "handlers of both",
            "Accelerator(kwargs_handlers)",
            Raw("[group]" if fsdp else "[ddp, group]"),
        ),
    )


def _checkpoint_rows(profile: Profile, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    """Return the settings of checkpoints, which the loop saves every few steps."""
    is_enabled = profile.train.checkpoint.enabled
    interval = checkpoint_interval(profile, batch)
    return (
        row(
            "checkpoint.enabled",
            f"{_PROJECT}(automatic_checkpoint_naming)",
            True if is_enabled else None,
        ),
        row(
            "checkpoint.interval_s",
            "save_state()",
            interval.steps if is_enabled else None,
            near=interval.remark,
        ),
    )


def _loop_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of the loop, which is your program's."""
    interval_steps = train.evaluation.interval_steps
    lost_evaluation = "no evaluation"
    if interval_steps:
        lost_evaluation = f"your loop evaluates, every {interval_steps} steps"
    return (
        row("evaluation", lost=lost_evaluation),
        row("log_interval_steps", lost="your loop logs"),
        row(
            "log_to", "Accelerator(log_with)", [*train.log_to] if train.log_to else None
        ),
        row("max_epochs", lost=remarks.max_epochs_remark(train, "loop")),
        row("stop_after_s", lost=remarks.stop_remark(train)),
        row(
            "exact resume with another number of ranks",
            lost="your loop skips the micro-batches trained on",
        ),
        row("non-padding tokens/s and MFU of every step", lost="your loop measures"),
    )
