"""Code of the calling program around another trainer. Pure."""

from collections.abc import Mapping

from autotune.profiles.decide.export.remarks import (
    OTHER_ORDER,
    activation_checkpointing_remark,
    layout_remark,
)
from autotune.profiles.decide.export.table import Equivalent, Raw, Value, row
from trainer.config.train_config import TrainConfig

_ADAMW_LINES = (
    (
        "bare = {name for name, _ in model.named_parameters() if"
        ' name.lower().endswith(("bias", "norm.weight"))}'
    ),
    "decayed = [one for name, one in model.named_parameters() if name not in bare]",
    "others = [one for name, one in model.named_parameters() if name in bare]",
    (
        'optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others,'
        ' "weight_decay": 0.0}], {})'
    ),
)
"""Code of an optimizer without weight decay of biases and norms, as in this project's
trainer; ``{}`` stands for the arguments of AdamW."""
CALLS_BEFORE_MODEL = {
    "set_seed": "set_seed({})",
    "seed_everything": "seed_everything({}, workers=True)",
    "matmul_precision": "torch.set_float32_matmul_precision({})",
}
"""Code before the model is made, by function; ``{}`` stands for its arguments."""
CALLS_AFTER_MODEL = {
    "activation_checkpointing_enable": "model.activation_checkpointing_enable({})",
    "DataLoader": "loader = DataLoader(dataset, collate_fn=collator, {})",
    "AdamW": "\n".join(_ADAMW_LINES),
    "get_scheduler": "schedule = get_scheduler(optimizer=optimizer, {})",
}
"""Code after the model is made, by function; ``{}`` stands for its arguments."""
PROGRAM_NAMES: Mapping[str, str] = {
    "micro_batch_size": "DataLoader(batch_size)",
    "order of the data": "DataLoader(shuffle)",
    "data.num_workers": "DataLoader(num_workers)",
    "data.prefetch_factor": "DataLoader(prefetch_factor)",
    "data.pin_memory": "DataLoader(pin_memory)",
    "workers persist over epochs": "DataLoader(persistent_workers)",
    "learning_rate": "AdamW(lr)",
    "adam_beta1": "AdamW(betas)",
    "adam_epsilon": "AdamW(eps)",
    "weight_decay": "AdamW(weight_decay)",
    "fused AdamW": "AdamW(fused)",
    "schedule": "get_scheduler(name)",
    "warmup_steps": "get_scheduler(num_warmup_steps)",
    "tf32": "matmul_precision(precision)",
    "steps of the schedule": "get_scheduler(num_training_steps)",
    "final_learning_rate_share": "get_scheduler(scheduler_specific_kwargs)",
    "activation_checkpointing": (
        "activation_checkpointing_enable(activation_checkpointing_kwargs)"
    ),
}
"""Argument of the code above that takes each setting, as ``function(argument)``."""


def program_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the settings that only code around a training loop can express.

    Args:
        train: Settings to export.
        fsdp: True if the target trains with FSDP, which checkpoints activations itself.
    """
    checkpointing: Value = None
    if train.activation_checkpointing != "none" and not fsdp:
        checkpointing = {"use_reentrant": False}
    lost_layout = layout_remark(train)
    if train.layout == "bucketed":
        lost_layout = "mixes all lengths in a micro-batch"

    def named(setting: str, value: Value, *, near: str | None = None) -> Equivalent:
        return row(setting, PROGRAM_NAMES[setting], value, near=near)

    return (
        named("adam_beta1", Raw((train.adam_beta1, train.adam_beta2))),
        named("fused AdamW", value=True),
        named("steps of the schedule", train.max_steps),
        named("tf32", _matmul_precision(train)),
        named("order of the data", value=True, near=OTHER_ORDER),
        named(
            "activation_checkpointing",
            checkpointing,
            near=activation_checkpointing_remark(train),
        ),
        row("adam_beta2"),
        row("layout", lost=lost_layout),
    )


def _matmul_precision(train: TrainConfig) -> str | None:
    """Return torch's precision of fp32 matmuls; None if the GPU runs none."""
    if train.device != "cuda" or train.precision != "fp32":
        return None
    return "high" if train.tf32 else "highest"


def model_calls(train: TrainConfig) -> tuple[str, ...]:
    """Return the code that makes the model and its batches."""
    is_modernbert = train.model.config["model_type"] == "modernbert"
    config_arguments = "**CONFIG"
    if is_modernbert and train.mlm_head == "sparse":
        config_arguments += ", sparse_prediction=True"
    if train.attention_dropout is not None:
        dropout_key = "attention_probs_dropout_prob"
        if is_modernbert:
            dropout_key = "attention_dropout"
        config_arguments += f", {dropout_key}={train.attention_dropout:g}"
    return (
        (
            "model = AutoModelForMaskedLM.from_config("
            f"AutoConfig.for_model({config_arguments}))"
            "  # CONFIG: [train.model.config] with the dataset's vocab_size"
        ),
        f"tokenizer(texts, truncation=True, max_length={train.seq_length_tokens})",
        (
            "collator = DataCollatorForLanguageModeling("
            f"tokenizer, mlm=True, mlm_probability={train.masking_probability:g})"
        ),
    )
