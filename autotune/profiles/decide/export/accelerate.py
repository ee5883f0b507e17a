"""Export of a profile to a file for ``accelerate launch --config_file``, and code for the loop around it. Pure."""

from autotune.profiles.decide.export import program
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Raw,
    Scalar,
    row,
)
from autotune.profiles.values import Profile

WRITTEN_FOR = "accelerate 1.15 and transformers 5.23"
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
_DDP, _PROJECT = "DistributedDataParallelKwargs", "ProjectConfiguration"
NAMES = {
    **program.PROGRAM_NAMES,
    "global_batch_size": "Accelerator(gradient_accumulation_steps)",
    "max_steps": "range()",
    "max_grad_norm": "clip_grad_norm_(max_norm)",
    "seed": "set_seed(seed)",
    "checkpoint.keep_last": f"{_PROJECT}(total_limit)",
    **program.ddp_names(f"{_DDP}({{}})"),
}


def settings(
    profile: Profile, batch: ExportedBatch, nodes: int
) -> tuple[Equivalent, ...]:
    """Return the settings that its file or the loop expresses, and those that it lacks."""
    train, ranks, shared = (
        profile.train,
        batch.ranks,
        profile.train.parallel.shard_ranks,
    )
    on_gpu, bf16 = train.device == "cuda", train.precision == "bf16"
    fsdp = train.parallel.strategy == "fsdp2" and on_gpu  # on CPUs, it ignores FSDP
    dtype = f"DDPCommunicationHookType.{train.parallel.gradient_dtype.upper()}"
    kind = (
        "FSDP"
        if fsdp
        else "NO"
        if ranks == 1
        else "MULTI_GPU"
        if on_gpu
        else "MULTI_CPU"
    )
    compiled: dict[str, Scalar] = {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": train.compile_mode,
        "dynamo_use_regional_compilation": True,
        "dynamo_use_dynamic": True,  # micro-batches are padded to their longest sample
    }
    config: dict[str, Scalar] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": train.activation_checkpointing != "none",
    }
    copies: dict[str, Scalar] | None = None
    if fsdp and shared is not None and ranks % shared == 0:
        copies = {
            "parallelism_config_dp_replicate_size": ranks // shared,
            "parallelism_config_dp_shard_size": shared,
        }
    whole = fsdp and shared is not None and copies is None and program.HSDP
    several = (
        "pass --machine_rank, --main_process_ip and --main_process_port on each node"
    )
    one_process = f"starts one process on CPUs: run mpirun -n {ranks} accelerate launch"
    said = program.remarks(train, fsdp=fsdp)
    return (
        *program.unexpressed_rows(train),
        *program.program_rows(train, fsdp=fsdp),
        *program.shared_rows(profile, batch, NAMES, fsdp=fsdp),
        row("launch", "compute_environment", "LOCAL_MACHINE"),
        row(
            "parallel.strategy",
            "distributed_type",
            kind,
            lost=said["parallel.strategy"],
            near=said["weights"],
        ),
        row(
            "layers gathered one at a time",
            "fsdp_config",
            config if fsdp else None,
            near=fsdp and "other layers",
        ),
        row("parallel.shard_ranks", "parallelism_config", copies, lost=whole),
        row("device", "use_cpu", not on_gpu),
        row("precision", "mixed_precision", "bf16" if bf16 else "no"),
        row("nodes", "num_machines", nodes),
        row("rank of the node", "machine_rank", 0, near=nodes > 1 and several),
        row("ranks", "num_processes", ranks, near=kind == "MULTI_CPU" and one_process),
        row(
            "compile",
            "dynamo_config",
            compiled if train.compiled else None,
            near=train.compiled and "compiles the rest of the model as well",
        ),
        row("compile_mode"),
        *program.hooked_rows(train, _DDP, "comm_hook", dtype, fsdp=fsdp),
        *_loop(profile, batch, fsdp=fsdp),
    )


def _loop(
    profile: Profile, batch: ExportedBatch, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of the loop, which is your program's."""
    train, on, interval = (
        profile.train,
        profile.train.checkpoint.enabled,
        profile.train.evaluation.interval_steps,
    )
    timeout, (every, how) = (
        f"timedelta(seconds={train.parallel.timeout_s:g})",
        program.checkpoint_steps(profile, batch),
    )
    return (
        row(
            "parallel.timeout_s",
            "InitProcessGroupKwargs(timeout)",
            Raw(timeout),
            near="kills the process after it",
        ),
        row(
            "handlers of both",
            "Accelerator(kwargs_handlers)",
            Raw("[group]" if fsdp else "[ddp, group]"),
        ),
        row(
            "run directory",
            f"{_PROJECT}(project_dir)",
            f"runs/accelerate-{train.model.name}",
            near=program.NO_RECORD,
        ),
        row(
            "checkpoint.enabled",
            f"{_PROJECT}(automatic_checkpoint_naming)",
            True if on else None,
        ),
        row("checkpoint.interval_s", "save_state()", every if on else None, near=how),
        row(
            "evaluation",
            lost=(
                f"your loop evaluates, every {interval} steps"
                if interval
                else "no evaluation"
            ),
        ),
        row("log_interval_steps", lost="your loop logs"),
        row(
            "log_to", "Accelerator(log_with)", [*train.log_to] if train.log_to else None
        ),
        row(
            "max_epochs",
            lost=train.max_epochs is not None and "only max_steps ends the loop",
        ),
        row("stop_after_s", lost=program.remarks(train, fsdp=fsdp)["stop_after_s"]),
        row(
            "exact resume with another number of ranks",
            lost="your loop skips the micro-batches trained on",
        ),
        row("non-padding tokens/s and MFU of every step", lost="your loop measures"),
    )
