"""Rows and code of a PyTorch program around another trainer. Pure."""

from autotune.subjects.mlm.export import schedule, shared
from autotune.subjects.mlm.export.shared import only_if
from autotune.subjects.mlm.export.table import Raw, RunToExport, SettingRow, Value

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
trainer."""
MODEL_CODE = {
    "for_model": (
        "model = AutoModelForMaskedLM.from_config(AutoConfig.for_model({}))"
        "  # CONFIG: [train.model.config] with the dataset's vocab_size"
    ),
    "tokenizer": "tokenizer(texts, truncation=True, {})",
    "DataCollatorForLanguageModeling": (
        "collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, {})"
    ),
}
"""Code that makes the model and its batches, by function."""
PROGRAM_CODE = {
    "set_seed": "set_seed({})",
    "seed_everything": "seed_everything({}, workers=True)",
    "matmul_precision": "torch.set_float32_matmul_precision({})",
    **MODEL_CODE,
    "activation_checkpointing_enable": "model.activation_checkpointing_enable({})",
    "DataLoader": "loader = DataLoader(dataset, collate_fn=collator, {})",
    "AdamW": "\n".join(_ADAMW_LINES),
    "get_scheduler": "schedule = get_scheduler(optimizer=optimizer, {})",
}
"""Code around a training loop that takes model, loader, optimizer and schedule."""


def _is_modernbert(run: RunToExport) -> bool:
    """Return whether the model is a ModernBERT, which has a sparse head as well."""
    return bool(run.train.model.config["model_type"] == "modernbert")


def _attention_dropout_argument(run: RunToExport) -> str:
    """Return the key of attention dropout in the model's config."""
    if _is_modernbert(run):
        return "for_model(attention_dropout)"
    return "for_model(attention_probs_dropout_prob)"


def _attention_dropout(run: RunToExport) -> Value:
    """Return attention dropout as Python code, with 0 for 0.0; None if it is unset."""
    dropout = run.train.attention_dropout
    return None if dropout is None else Raw(str(dropout).removesuffix(".0"))


def _matmul_precision(run: RunToExport) -> str | None:
    """Return torch's precision of fp32 matmuls; None if the GPU runs none."""
    if not run.on_gpu or run.has_bf16:
        return None
    return "high" if run.train.tf32 else "highest"


def _layout_remark(run: RunToExport) -> str | None:
    """Return what a DataLoader does instead of packing or grouping by length."""
    if run.train.layout == "bucketed":
        return "mixes all lengths in a micro-batch"
    return shared.padded_remark(run)


_has_sparse_prediction = only_if(
    lambda run: run.train.mlm_head == "sparse" and _is_modernbert(run), True
)
MODEL_ROWS = (
    SettingRow("model", "for_model()", Raw("**CONFIG")),
    SettingRow(
        "mlm_head",
        "for_model(sparse_prediction)",
        _has_sparse_prediction,
        near=only_if(
            lambda run: bool(_has_sparse_prediction(run)),
            "counts the masked tokens of each micro-batch, for which the host waits",
        ),
        lost=only_if(
            lambda run: run.train.mlm_head == "sparse" and not _is_modernbert(run),
            "computes all positions",
        ),
    ),
    SettingRow("attention_dropout", _attention_dropout_argument, _attention_dropout),
    SettingRow("seq_length_tokens", "tokenizer(max_length)"),
    SettingRow(
        "masking_probability",
        "DataCollatorForLanguageModeling(mlm_probability)",
        near="masks depend on the order of the batches",
    ),
)
"""Settings of ``MODEL_CODE``, which all targets have."""
PROGRAM_ROWS = (
    *MODEL_ROWS,
    SettingRow("tf32", "matmul_precision(precision)", _matmul_precision),
    SettingRow(
        "activation_checkpointing",
        "activation_checkpointing_enable(activation_checkpointing_kwargs)",
        # FSDP checkpoints activations itself.
        only_if(
            lambda run: run.checkpoints_activations and not run.fsdp,
            {"use_reentrant": False},
        ),
        near=shared.selective_remark,
    ),
    SettingRow("layout", lost=_layout_remark),
    SettingRow(
        "order of the data", "DataLoader(shuffle)", True, near=shared.OTHER_ORDER
    ),
    SettingRow(
        "micro_batch_size",
        "DataLoader(batch_size)",
        shared.samples_per_micro_batch,
        near=shared.one_sample_remark,
    ),
    SettingRow(
        "data.num_workers", "DataLoader(num_workers)", near=shared.workers_remark
    ),
    SettingRow(
        "data.prefetch_factor", "DataLoader(prefetch_factor)", shared.prefetch_factor
    ),
    SettingRow("data.pin_memory", "DataLoader(pin_memory)", shared.pin_memory),
    SettingRow(
        "workers persist over epochs",
        "DataLoader(persistent_workers)",
        shared.persistent_workers,
    ),
    SettingRow(
        "adam_beta1",
        "AdamW(betas)",
        lambda run: Raw((run.train.adam_beta1, run.train.adam_beta2)),
    ),
    SettingRow("adam_beta2"),  # Part of betas.
    SettingRow("fused AdamW", "AdamW(fused)", True),
    SettingRow("learning_rate", "AdamW(lr)"),
    SettingRow("weight_decay", "AdamW(weight_decay)"),
    SettingRow("adam_epsilon", "AdamW(eps)"),
    SettingRow(
        "steps of the schedule",
        "get_scheduler(num_training_steps)",
        lambda run: run.train.max_steps,
    ),
    SettingRow("schedule", "get_scheduler(name)", schedule.schedule_name),
    SettingRow(
        "final_learning_rate_share",
        "get_scheduler(scheduler_specific_kwargs)",
        schedule.schedule_arguments,
    ),
    SettingRow(
        "warmup_steps", "get_scheduler(num_warmup_steps)", near=schedule.warm_up_remark
    ),
)
"""Settings of ``PROGRAM_CODE``, for targets whose loop is given its objects."""
