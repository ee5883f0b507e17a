"""Export to a file for ``accelerate launch --config_file``. Pure.

The file cannot hold the settings of the training loop, which is your program's: the
export has code for them.
"""

from autotune.subjects.mlm.export import batch, shared
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


def _distributed_type(run: RunToExport) -> str:
    """Return accelerate's name of the parallel strategy and device."""
    if run.fsdp:
        return "FSDP"
    if run.ranks == 1:
        return "NO"
    return "MULTI_GPU" if run.on_gpu else "MULTI_CPU"


def _parallelism_config(run: RunToExport) -> Value:
    """Return the settings of HSDP; None without it."""
    copies = shared.copies_of_weights(run)
    if copies is None:
        return None
    return {
        "parallelism_config_dp_replicate_size": copies,
        "parallelism_config_dp_shard_size": run.train.parallel.shard_ranks,
    }


def _processes_remark(run: RunToExport) -> str | None:
    """Return how to start several processes on CPUs, which accelerate does not."""
    if _distributed_type(run) != "MULTI_CPU":
        return None
    return f"starts one process on CPUs: run mpirun -n {run.ranks} accelerate launch"


def _dynamo_config(run: RunToExport) -> Value:
    """Return the settings of torch.compile, for each layer."""
    if not run.train.compiled:
        return None
    return {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": run.train.compile_mode,
        "dynamo_use_regional_compilation": True,
        # Micro-batches are padded to their longest sample.
        "dynamo_use_dynamic": True,
    }


def _gradient_hook(run: RunToExport) -> Value:
    """Return the hook that compresses gradients, as Python code; FSDP takes none."""
    dtype = run.train.parallel.gradient_dtype
    if run.fsdp or dtype == "fp32":
        return None
    return Raw(f"DDPCommunicationHookType.{dtype.upper()}")


def _evaluation_remark(run: RunToExport) -> str:
    """Return how often your loop has to evaluate."""
    interval_steps = run.train.evaluation.interval_steps
    if interval_steps is None:
        return "no evaluation"
    return f"your loop evaluates, every {interval_steps} steps"


TARGET = ExportTarget(
    written_for="accelerate 1.15 and transformers 5.23",
    # On CPUs, accelerate ignores FSDP.
    fsdp_on_cpus=False,
    code={
        **PROGRAM_CODE,
        "DistributedDataParallelKwargs": "ddp = DistributedDataParallelKwargs({})",
        "InitProcessGroupKwargs": "group = InitProcessGroupKwargs({})",
        "ProjectConfiguration": "project = ProjectConfiguration({})",
        "Accelerator": "accelerator = Accelerator(project_config=project, {})",
        "prepare": (
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            "  # not the schedule"
        ),
        "range": (
            "for step in range({}): ..."
            "  # with the lines below, for each optimizer step"
        ),
        "accumulate": (
            "with accelerator.accumulate(model): ..."
            "  # micro-batch: backward, clip as below, optimizer.step()"
        ),
        "clip_grad_norm_": (
            "if accelerator.sync_gradients:"
            " accelerator.clip_grad_norm_(model.parameters(), {})"
        ),
        "step": "if accelerator.sync_gradients: schedule.step()",
        "save_state": "if (step + 1) % {} == 0: accelerator.save_state()",
    },
    rows=(
        *UNEXPRESSED_ROWS,
        *PROGRAM_ROWS,
        SettingRow(
            "global_batch_size",
            "Accelerator(gradient_accumulation_steps)",
            shared.accumulation_steps,
            near=shared.whole_micro_batches_remark,
        ),
        SettingRow("max_steps", "range()"),
        SettingRow("max_grad_norm", "clip_grad_norm_(max_norm)"),
        SettingRow("seed", "set_seed(seed)", near=shared.OTHER_DRAWS),
        SettingRow(
            "checkpoint.keep_last",
            "ProjectConfiguration(total_limit)",
            shared.kept_checkpoints,
        ),
        *shared.ddp_rows("DistributedDataParallelKwargs({})".format),
        SettingRow("launch", "compute_environment", "LOCAL_MACHINE"),
        SettingRow(
            "parallel.strategy",
            "distributed_type",
            _distributed_type,
            near=shared.bf16_weights_remark,
            lost=shared.plain_ddp_remark,
        ),
        shared.fsdp_row("fsdp_"),
        SettingRow(
            "parallel.shard_ranks",
            "parallelism_config",
            _parallelism_config,
            lost=shared.uneven_copies_remark,
        ),
        SettingRow("device", "use_cpu", lambda run: not run.on_gpu),
        SettingRow(
            "precision",
            "mixed_precision",
            lambda run: "bf16" if run.has_bf16 else "no",
        ),
        SettingRow("nodes", "num_machines", lambda run: run.nodes),
        SettingRow(
            "rank of the node",
            "machine_rank",
            0,
            near=only_if(
                lambda run: run.nodes > 1,
                "pass --machine_rank, --main_process_ip and --main_process_port on"
                " each node",
            ),
        ),
        SettingRow(
            "ranks", "num_processes", lambda run: run.ranks, near=_processes_remark
        ),
        SettingRow(
            "compile",
            "dynamo_config",
            _dynamo_config,
            near=only_if(
                lambda run: run.train.compiled, "compiles the rest of the model as well"
            ),
        ),
        SettingRow("compile_mode"),  # Part of dynamo_config.
        SettingRow(
            "parallel.gradient_dtype",
            "DistributedDataParallelKwargs(comm_hook)",
            _gradient_hook,
            lost=shared.fsdp_gradient_dtype_remark,
        ),
        SettingRow(
            "parallel.gradient_as_bucket_view",
            "DistributedDataParallelKwargs(gradient_as_bucket_view)",
            shared.gradient_as_bucket_view,
        ),
        SettingRow(
            "parallel.timeout_s",
            "InitProcessGroupKwargs(timeout)",
            shared.timeout,
            near=shared.KILLS_AFTER_TIMEOUT,
        ),
        SettingRow(
            "handlers of both",
            "Accelerator(kwargs_handlers)",
            lambda run: Raw("[group]" if run.fsdp else "[ddp, group]"),
        ),
        SettingRow(
            "run directory",
            "ProjectConfiguration(project_dir)",
            lambda run: f"runs/accelerate-{run.train.model.name}",
            near=shared.NO_RECORD,
        ),
        SettingRow(
            "checkpoint.enabled",
            "ProjectConfiguration(automatic_checkpoint_naming)",
            shared.checkpoints_enabled,
        ),
        SettingRow(
            "checkpoint.interval_s",
            "save_state()",
            batch.steps_between_checkpoints,
            near=batch.checkpoint_interval_remark,
        ),
        SettingRow("evaluation", lost=_evaluation_remark),
        SettingRow("log_interval_steps", lost="your loop logs"),
        SettingRow("log_to", "Accelerator(log_with)", shared.loggers),
        SettingRow(
            "max_epochs",
            lost=only_if(
                lambda run: run.train.max_epochs is not None,
                "only max_steps ends the loop",
            ),
        ),
        SettingRow("stop_after_s", lost=shared.no_time_limit_remark),
        SettingRow(
            "exact resume with another number of ranks",
            lost="your loop skips the micro-batches trained on",
        ),
        SettingRow(
            "non-padding tokens/s and MFU of every step", lost="your loop measures"
        ),
    ),
)
"""Table of accelerate, which prepares the objects of your loop."""
