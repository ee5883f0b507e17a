"""Code of the calling program around another trainer. Pure."""

from collections.abc import Mapping

from autotune.profiles.decide.export.shared import OTHER_ORDER, shared_remarks
from autotune.profiles.decide.export.table import Equivalent, Raw, Value, row
from trainer.config.train_config import TrainConfig

FIRST = {
    "set_seed": "set_seed({})",
    "seed_everything": "seed_everything({}, workers=True)",
    "matmul_precision": "torch.set_float32_matmul_precision({})",
}
"""Code before the model is made."""
PROGRAM = {
    "activation_checkpointing_enable": "model.activation_checkpointing_enable({})",
    "DataLoader": "loader = DataLoader(dataset, collate_fn=collator, {})",
    "AdamW": "\n".join(
        (
            (
                "bare = {name for name, _ in model.named_parameters() if"
                ' name.lower().endswith(("bias", "norm.weight"))}'
            ),
            (
                "decayed = [one for name, one in model.named_parameters() if name not"
                " in bare]"
            ),
            "others = [one for name, one in model.named_parameters() if name in bare]",
            (
                'optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others,'
                ' "weight_decay": 0.0}], {})'
            ),
        )
    ),
    "get_scheduler": "schedule = get_scheduler(optimizer=optimizer, {})",
}
"""Code after the model is made, for the arguments in ``PROGRAM_NAMES``."""
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


def program_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the settings whose values only code around a loop takes."""
    remarks = shared_remarks(train, fsdp=fsdp)
    tf32 = None
    if train.device == "cuda" and train.precision == "fp32":
        tf32 = "high" if train.tf32 else "highest"
    checkpointing: Value = None
    if train.activation_checkpointing != "none" and not fsdp:
        checkpointing = {"use_reentrant": False}
    lost_layout = remarks.layout
    if train.layout == "bucketed":
        lost_layout = "mixes all lengths in a micro-batch"

    def named(setting: str, value: Value, *, near: str | None = None) -> Equivalent:
        return row(setting, PROGRAM_NAMES[setting], value, near=near)

    return (
        named("adam_beta1", Raw((train.adam_beta1, train.adam_beta2))),
        named("fused AdamW", value=True),
        named("steps of the schedule", train.max_steps),
        named("tf32", tf32),
        named("order of the data", value=True, near=OTHER_ORDER),
        named(
            "activation_checkpointing",
            checkpointing,
            near=remarks.activation_checkpointing,
        ),
        row("adam_beta2"),
        row("layout", lost=lost_layout),
    )


def model_calls(train: TrainConfig) -> tuple[str, ...]:
    """Return the code that makes the model and its batches."""
    is_modernbert = train.model.config["model_type"] == "modernbert"
    arguments = "**CONFIG"
    if is_modernbert and train.mlm_head == "sparse":
        arguments += ", sparse_prediction=True"
    if train.attention_dropout is not None:
        key = "attention_probs_dropout_prob"
        if is_modernbert:
            key = "attention_dropout"
        arguments += f", {key}={train.attention_dropout:g}"
    return (
        (
            "model = AutoModelForMaskedLM.from_config("
            f"AutoConfig.for_model({arguments}))"
            "  # CONFIG: [train.model.config] with the dataset's vocab_size"
        ),
        f"tokenizer(texts, truncation=True, max_length={train.seq_length_tokens})",
        (
            "collator = DataCollatorForLanguageModeling("
            f"tokenizer, mlm=True, mlm_probability={train.masking_probability:g})"
        ),
    )
