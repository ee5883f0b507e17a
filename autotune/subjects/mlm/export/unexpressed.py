"""Settings that no target has an argument for. Pure.

The effect of some is that of other rows; the effect of the rest is lost, which a remark
says.
"""

from autotune.subjects.mlm.export.shared import only_if
from autotune.subjects.mlm.export.table import RunToExport, SettingRow


def _has_varlen_attention(run: RunToExport) -> bool:
    """Return whether attention skips padding in this project's trainer."""
    attention = run.train.attention
    if attention == "auto":
        return run.on_gpu and run.has_bf16 and run.train.layout == "packed"
    return attention in {"varlen", "fa4"}


UNEXPRESSED_ROWS = (
    SettingRow("decay_share"),  # Part of the schedule.
    SettingRow("global_batch_tokens"),  # Part of the accumulation steps.
    SettingRow("global_batch_samples"),  # The same.
    SettingRow("checkpoint.interval_steps"),  # Part of checkpoint.interval_s.
    SettingRow(
        "residual_dtype",
        lost=only_if(
            lambda run: run.train.residual_dtype == "bf16",
            "autocast keeps the residual stream in fp32",
        ),
    ),
    SettingRow(
        "float8",
        lost=only_if(
            lambda run: run.train.float8 != "none",
            "computes linear layers in the precision of the others",
        ),
    ),
    SettingRow(
        "fused_cross_entropy",
        lost=only_if(lambda run: run.train.fused_cross_entropy, "holds all logits"),
    ),
    SettingRow(
        "mix_order_reduction",
        lost=only_if(
            lambda run: (
                run.on_gpu and run.train.compiled and not run.train.mix_order_reduction
            ),
            "compiles with torch's default; your program can set"
            " torch._inductor.config.triton.mix_order_reduction = False",
        ),
    ),
    SettingRow(
        "combo_kernels",
        lost=only_if(
            lambda run: run.on_gpu and run.train.compiled and run.train.combo_kernels,
            "compiles with torch's default; your program can set"
            " torch._inductor.config.combo_kernels = True",
        ),
    ),
    SettingRow(
        "fused_norms",
        lost=only_if(
            lambda run: run.train.fused_norms,
            "computes layer norms with torch's kernels",
        ),
    ),
    SettingRow(
        "gelu_epilogues",
        lost=only_if(
            lambda run: run.train.gelu_epilogues,
            "computes GELU after its matmul, and keeps it for the backward pass",
        ),
    ),
    SettingRow(
        "last_layer",
        lost=only_if(
            lambda run: (
                run.train.mlm_head == "sparse" and run.train.last_layer == "sparse"
            ),
            "computes all positions",
        ),
    ),
    SettingRow(
        "attention",
        lost=only_if(
            _has_varlen_attention,
            "computes whole padded sequences under a mask",
        ),
    ),
    SettingRow(
        "masks depend on seed, epoch and sample only",
        lost="masks change with ranks, workers and resuming",
    ),
    SettingRow("data.dataset_hash", lost="accepts any dataset"),
    SettingRow("data.path", lost="your program passes a dataset in its own format"),
    SettingRow(
        "data.stage_to",
        lost=only_if(
            lambda run: run.train.data.stage_to is not None,
            "no staging to local disks",
        ),
    ),
    SettingRow(
        "checkpoint.asynchronous",
        lost=only_if(
            lambda run: (
                run.train.checkpoint.enabled and run.train.checkpoint.asynchronous
            ),
            "training waits for each checkpoint",
        ),
    ),
    SettingRow(
        "checkpoint.keep_every_steps",
        lost=only_if(
            lambda run: run.train.checkpoint.keep_every_steps is not None,
            "older ones are deleted",
        ),
    ),
    SettingRow(
        "health",
        lost=(
            "a loss that is not finite, spikes or explodes is neither skipped nor"
            " rolled back"
        ),
    ),
)
"""Rows of these settings, for every table."""
