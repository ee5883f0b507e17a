"""Settings for which no target has a separate argument. Pure.

Other settings of an export or its code have the effect of some; the effect of the rest
is lost, which a remark says.
"""

from autotune.profiles.decide.export.table import Equivalent, row
from trainer.config.train_config import TrainConfig

_COVERED_SETTINGS = (
    "model",
    "attention_dropout",
    "seq_length_tokens",
    "decay_share",
    "global_batch_tokens",
    "global_batch_samples",
    "checkpoint.interval_steps",
)
"""Settings whose effect is that of other settings of an export, or of its code."""


def unexpressed_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings for which no target has a separate argument.

    A setting that the profile uses, and whose effect is lost, has a remark on what
    happens instead.
    """
    return (
        *(row(setting) for setting in _COVERED_SETTINGS),
        *_model_rows(train),
        *_data_rows(train),
        *_checkpoint_rows(train),
        row(
            "health",
            lost=(
                "a loss that is not finite, spikes or explodes is neither skipped nor"
                " rolled back"
            ),
        ),
    )


def _model_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of precision, compiler, loss, masking and attention."""
    is_compiled_on_gpu = train.compiled and train.device == "cuda"
    return (
        _lost_if_used(
            "residual_dtype",
            "autocast keeps the residual stream in fp32",
            is_used=train.residual_dtype == "bf16",
        ),
        _lost_if_used(
            "float8",
            "computes linear layers in the precision of the others",
            is_used=train.float8 != "none",
        ),
        _lost_if_used(
            "fused_cross_entropy",
            "holds all logits",
            is_used=train.fused_cross_entropy,
        ),
        _lost_if_used(
            "mix_order_reduction",
            "compiles with torch's default; your program can set"
            " torch._inductor.config.triton.mix_order_reduction = False",
            is_used=is_compiled_on_gpu and not train.mix_order_reduction,
        ),
        _lost_if_used(
            "combo_kernels",
            "compiles with torch's default; your program can set"
            " torch._inductor.config.combo_kernels = True",
            is_used=is_compiled_on_gpu and train.combo_kernels,
        ),
        _lost_if_used(
            "fused_norms",
            "computes layer norms with torch's kernels",
            is_used=train.fused_norms,
        ),
        _lost_if_used(
            "gelu_epilogues",
            "computes GELU after its matmul, and keeps it for the backward pass",
            is_used=train.gelu_epilogues,
        ),
        row(
            "masking_probability",
            near="set in the collator; masks depend on the order of the batches",
        ),
        *_mlm_head_rows(train),
        _lost_if_used(
            "attention",
            "computes whole padded sequences under a mask",
            is_used=_has_varlen_attention(train),
        ),
    )


def _data_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of the dataset, and what masks depend on."""
    return (
        row(
            "masks depend on seed, epoch and sample only",
            lost="masks change with ranks, workers and resuming",
        ),
        row("data.dataset_hash", lost="accepts any dataset"),
        row("data.path", lost="your program passes a dataset in its own format"),
        _lost_if_used(
            "data.stage_to",
            "no staging to local disks",
            is_used=train.data.stage_to is not None,
        ),
    )


def _checkpoint_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of checkpoints that need this project's writer."""
    checkpoint = train.checkpoint
    return (
        _lost_if_used(
            "checkpoint.asynchronous",
            "training waits for each checkpoint",
            is_used=checkpoint.enabled and checkpoint.asynchronous,
        ),
        _lost_if_used(
            "checkpoint.keep_every_steps",
            "older ones are deleted",
            is_used=checkpoint.keep_every_steps is not None,
        ),
    )


def _lost_if_used(setting: str, remark: str, *, is_used: bool) -> Equivalent:
    """Return a setting, which is lost if the profile uses it.

    Args:
        setting: Dotted key of the setting.
        remark: What happens instead.
        is_used: True if the profile uses the setting.
    """
    return row(setting, lost=remark if is_used else None)


def _mlm_head_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of the sparse MLM head, which only ModernBERT has as well."""
    if train.mlm_head != "sparse":
        return row("mlm_head"), row("last_layer")
    all_positions = "computes all positions"
    head = row("mlm_head", lost=all_positions)
    if train.model.config["model_type"] == "modernbert":
        head = row("mlm_head", near="sparse_prediction")
    is_sparse_layer = train.last_layer == "sparse"
    return head, row("last_layer", lost=all_positions if is_sparse_layer else None)


def _has_varlen_attention(train: TrainConfig) -> bool:
    """Return whether attention skips padding in this project's trainer."""
    if train.attention != "auto":
        return train.attention in {"varlen", "fa4"}
    return (
        train.device == "cuda"
        and train.precision == "bf16"
        and train.layout == "packed"
    )
