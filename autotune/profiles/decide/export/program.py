"""Settings that every target takes by some name, those that none takes, the program's code, and the batch. Pure."""

import math
import sys
from collections.abc import Mapping

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export.table import (
    Equivalent,
    ExportedBatch,
    Raw,
    Scalar,
    Value,
    row,
)
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.profiles.values import Profile
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
NO_RECORD, OTHER_ORDER = (
    "without run record, steps and events",
    "a different permutation of each epoch",
)
HSDP = "HSDP: all ranks share one copy of the weights"
_TORCHS_BUCKET_CAP_MIB = 25
"""Default of torch: if no size is given, it makes the first bucket smaller, so that it
is sent early."""


def ddp_names(form: str) -> dict[str, str]:
    """Return the names of DDP's settings, each in the place of ``{}``."""
    names = {
        "parallel.bucket_cap_mib": "bucket_cap_mb",
        "parallel.static_graph": "static_graph",
        "every parameter is used": "find_unused_parameters",
        "no synchronisation of buffers": "broadcast_buffers",
    }
    return {setting: form.replace("{}", name) for setting, name in names.items()}


def program_rows(train: TrainConfig, *, fsdp: bool) -> tuple[Equivalent, ...]:
    """Return the settings whose values only code around a loop takes."""
    betas, tf32 = (
        (train.adam_beta1, train.adam_beta2),
        train.device == "cuda" and train.precision == "fp32",
    )
    again: Value = (
        {"use_reentrant": False}
        if train.activation_checkpointing != "none" and not fsdp
        else None
    )
    said, bucketed = (
        remarks(train, fsdp=fsdp),
        train.layout == "bucketed" and "mixes all lengths in a micro-batch",
    )
    values: tuple[tuple[str, Value, str | bool], ...] = (
        ("adam_beta1", Raw(betas), ""),
        ("fused AdamW", True, ""),
        ("steps of the schedule", train.max_steps, ""),
        ("tf32", ("high" if train.tf32 else "highest") if tf32 else None, ""),
        ("order of the data", True, OTHER_ORDER),
        ("activation_checkpointing", again, said["activation_checkpointing"]),
    )
    rows = (
        row(setting, PROGRAM_NAMES[setting], value, near=near)
        for setting, value, near in values
    )
    return (*rows, row("adam_beta2"), row("layout", lost=said["layout"] or bucketed))


def hooked_rows(
    train: TrainConfig, call: str, hook: str, dtype: str, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of gradients that DDP takes as arguments of ``call``: the hook to compress, and the view."""
    parallel = train.parallel
    half = Raw(dtype) if parallel.gradient_dtype != "fp32" and not fsdp else None
    view, said = (
        None if fsdp else parallel.gradient_as_bucket_view,
        remarks(train, fsdp=fsdp),
    )
    lost = fsdp and said["parallel.gradient_dtype"]
    return (
        row("parallel.gradient_dtype", f"{call}({hook})", half, lost=lost),
        row(
            "parallel.gradient_as_bucket_view", f"{call}(gradient_as_bucket_view)", view
        ),
    )


def shared_rows(
    profile: Profile, batch: ExportedBatch, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings with one value and one remark in all targets, by the name that one gives them, if any."""
    train, data, saving, parallel = (
        profile.train,
        profile.train.data,
        profile.train.checkpoint,
        profile.train.parallel,
    )
    packed, workers, on = train.layout == "packed", data.num_workers > 0, saving.enabled
    other = packed or batch.per_device_batch_size != train.micro_batch_size
    rounded = packed or batch.exported_samples_per_step != batch.sequences_per_step
    more = profile.evidence.workers is not None and "requires more workers"
    schedule, arguments = their_schedule(train)
    late = "its first step has learning rate 0: the warm-up lags by one step"
    if train.schedule == "wsd" and train.final_learning_rate_share:
        late = "its warm-up starts at the final learning rate instead of 0"
    bucket = (
        parallel.bucket_cap_mib
        if parallel.bucket_cap_mib != _TORCHS_BUCKET_CAP_MIB
        else None
    )
    values: tuple[tuple[str, Value, str | bool], ...] = (
        (
            "micro_batch_size",
            batch.per_device_batch_size,
            other and "one sample per sequence",
        ),
        (
            "global_batch_size",
            batch.gradient_accumulation_steps,
            rounded and "whole micro-batches only",
        ),
        *(
            (one, getattr(train, one), "")
            for one in ("learning_rate", "weight_decay", "adam_epsilon", "max_steps")
        ),
        ("max_grad_norm", train.max_grad_norm, ""),
        ("schedule", schedule, ""),
        ("final_learning_rate_share", dict(arguments) or None, ""),
        ("warmup_steps", train.warmup_steps, train.warmup_steps > 0 and late),
        ("seed", train.seed, "the same seed gives other initial weights and dropout"),
        ("data.num_workers", data.num_workers, more),
        ("data.prefetch_factor", data.prefetch_factor if workers else None, ""),
        ("data.pin_memory", data.pin_memory and train.device == "cuda", ""),
        ("workers persist over epochs", True if workers else None, ""),
        ("checkpoint.keep_last", saving.keep_last if on else None, ""),
        ("parallel.bucket_cap_mib", None if fsdp else bucket, ""),
        (
            "parallel.static_graph",
            True if parallel.static_graph and not fsdp else None,
            "",
        ),
        ("every parameter is used", None if fsdp else False, ""),
        ("no synchronisation of buffers", None if fsdp else False, ""),
    )
    return tuple(
        row(setting, names.get(setting), value, near=near)
        for setting, value, near in values
    )


def unexpressed_rows(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return settings that no target expresses, each with what happens instead if this profile uses it."""
    varlen = (
        train.device == "cuda"
        and train.precision == "bf16"
        and train.layout == "packed"
    )
    varlen = (
        varlen if train.attention == "auto" else train.attention in {"varlen", "fa3"}
    )
    masked, sparse = (
        train.mlm_head == "sparse",
        train.model.config["model_type"] == "modernbert",
    )
    saving, keeps = train.checkpoint, train.checkpoint.keep_every_steps is not None
    waits = (
        saving.enabled and saving.asynchronous and "training waits for each checkpoint"
    )
    every = "computes all positions"
    return (
        *map(row, ("model", "attention_dropout", "seq_length_tokens", "decay_share")),
        *map(
            row,
            (
                "global_batch_tokens",
                "global_batch_samples",
                "checkpoint.interval_steps",
            ),
        ),
        row(
            "residual_dtype",
            lost=train.residual_dtype == "bf16"
            and "autocast keeps the residual stream in fp32",
        ),
        row(
            "float8",
            lost=train.float8 != "none"
            and "computes linear layers in the precision of the others",
        ),
        row(
            "fused_cross_entropy", lost=train.fused_cross_entropy and "holds all logits"
        ),
        row(
            "masking_probability",
            near="set in the collator; masks depend on the order of the batches",
        ),
        row(
            "mlm_head",
            near=masked and sparse and "sparse_prediction",
            lost=masked and not sparse and every,
        ),
        row("last_layer", lost=masked and train.last_layer == "sparse" and every),
        row(
            "attention", lost=varlen and "computes whole padded sequences under a mask"
        ),
        row(
            "masks depend on seed, epoch and sample only",
            lost="masks change with ranks, workers and resuming",
        ),
        row("data.dataset_hash", lost="accepts any dataset"),
        row("data.path", lost="your program passes a dataset in its own format"),
        row(
            "data.stage_to",
            lost=train.data.stage_to is not None and "no staging to local disks",
        ),
        row("checkpoint.asynchronous", lost=waits),
        row("checkpoint.keep_every_steps", lost=keeps and "older ones are deleted"),
        row(
            "health",
            lost=(
                "a loss that is not finite, spikes or explodes is neither skipped nor"
                " rolled back"
            ),
        ),
    )


def model_calls(train: TrainConfig) -> tuple[str, ...]:
    """Return the code that makes the model and its batches."""
    model_type = str(train.model.config["model_type"])
    given = (
        ", sparse_prediction=True"
        if model_type == "modernbert" and train.mlm_head == "sparse"
        else ""
    )
    if train.attention_dropout is not None:
        key = (
            "attention_dropout"
            if model_type == "modernbert"
            else "attention_probs_dropout_prob"
        )
        given += f", {key}={train.attention_dropout:g}"
    return (
        (
            "model ="
            f" AutoModelForMaskedLM.from_config(AutoConfig.for_model(**CONFIG{given})) "
            " # CONFIG: [train.model.config] with the dataset's vocab_size"
        ),
        f"tokenizer(texts, truncation=True, max_length={train.seq_length_tokens})",
        (
            "collator = DataCollatorForLanguageModeling("
            f"tokenizer, mlm=True, mlm_probability={train.masking_probability:g})"
        ),
    )


def their_schedule(train: TrainConfig) -> tuple[str, dict[str, Scalar]]:
    """Return the name and arguments of the schedule with the same learning rates after the warm-up."""
    share = train.final_learning_rate_share
    if train.schedule == "constant" or (train.schedule == "linear" and share == 1):
        return "constant_with_warmup", {}
    if train.schedule == "linear":
        return (
            ("linear", {})
            if share == 0
            else ("polynomial", {"lr_end": share * train.learning_rate, "power": 1.0})
        )
    if train.schedule == "cosine":
        return (
            ("cosine", {})
            if share == 0
            else ("cosine_with_min_lr", {"min_lr_rate": share})
        )
    falling = max(1, round(train.decay_share * train.max_steps))
    steps = train.max_steps - max(train.warmup_steps, train.max_steps - falling)
    return "warmup_stable_decay", {
        "num_decay_steps": steps,
        "decay_type": "1-sqrt",
        "min_lr_ratio": share,
    }


def remarks(train: TrainConfig, *, fsdp: bool) -> dict[str, str | bool]:
    """Return remarks that several targets share, by setting.

    False if they do not apply.
    """
    dtype, gathered = train.parallel.gradient_dtype, fsdp and train.precision == "bf16"
    gradients: str | bool = (
        dtype != "fp32" and "synchronises gradients in fp32: twice the bytes"
    )
    if gathered:
        gradients = dtype != "bf16" and "synchronises gradients in bf16, as bf16 is on"
    packed = (
        "packing would allow cross-document attention: one padded sample per sequence"
    )
    replaced = train.parallel.strategy != "ddp" and not fsdp
    return {
        "activation_checkpointing": (
            train.activation_checkpointing == "selective"
            and "recomputes matmuls as well"
        ),
        "layout": train.layout == "packed" and packed,
        "parallel.strategy": (
            replaced and "plain DDP: every rank holds the whole optimizer state"
        ),
        "parallel.gradient_dtype": gradients,  # without a hook
        "stop_after_s": (
            train.stop_after_s is not None
            and "does not save and exit before the time limit"
        ),
        "weights": (
            gathered and "with bf16 it gathers weights and reduces gradients in bf16"
        ),
    }


def exported_batch(profile: Profile, means: SequenceMeans, ranks: int) -> ExportedBatch:
    """Return the optimizer step of a profile, and the nearest one of whole samples.

    It keeps, in this order: at most as many sequences in a micro-batch as were verified
    to fit; the non-padding tokens of an optimizer step, as near as whole micro-batches
    of all ranks allow.
    """
    train, rows = profile.train, profile.train.global_batch_size
    if train.global_batch_tokens is not None and means.non_padding_tokens:
        rows = max(1, round(train.global_batch_tokens / means.non_padding_tokens))
    elif train.global_batch_samples is not None and means.samples:
        rows = max(1, round(train.global_batch_samples / means.samples))
    samples = max(1, round(rows * (means.samples or 1.0)))
    steps = max(1, math.ceil(samples / (train.micro_batch_size * ranks)))
    each = min(train.micro_batch_size, max(1, round(samples / (steps * ranks))))
    exported = each * steps * ranks
    known = (
        means.non_padding_tokens / means.samples
        if means.non_padding_tokens and means.samples
        else None
    )
    return ExportedBatch(
        ranks=ranks,
        sequences_per_step=rows,
        samples_per_sequence=means.samples,
        tokens_per_step=means.non_padding_tokens and rows * means.non_padding_tokens,
        per_device_batch_size=each,
        gradient_accumulation_steps=steps,
        exported_samples_per_step=exported,
        exported_tokens_per_step=known and exported * known,
    )


def checkpoint_steps(profile: Profile, batch: ExportedBatch) -> tuple[int | None, str]:
    """Return the steps between checkpoints, as seconds become steps at the measured rate, and their source."""
    saving = profile.train.checkpoint
    if (step := _step_s(profile, batch)) is None:
        return (
            saving.interval_steps,
            "no measured step time to convert seconds into steps",
        )
    every = max(1, math.floor(min(saving.interval_s / max(1e-9, step[0]), sys.maxsize)))
    how = f"steps of {step[0]:.3g} s by this project's trainer ({step[1]})"
    return min(every, saving.interval_steps or sys.maxsize), how


def _step_s(profile: Profile, batch: ExportedBatch) -> tuple[float, str] | None:
    """Return the seconds of this trainer's optimizer step and their source.

    None if nothing was measured.
    """
    tokens, rate, tuned = (
        batch.tokens_per_step,
        expected_rate(profile, batch.ranks),
        tuned_rate(profile),
    )
    if tokens is not None and rate is not None:
        return tokens / rate.value, f"{rate.known}: {rate.source}"
    if tokens is None or tuned is None:
        return None
    return (
        tokens / (tuned.value * batch.ranks / tuned.ranks),
        f"assumed: per rank as fast as in {tuned.source}",
    )


def batch_warnings(
    train: TrainConfig, batch: ExportedBatch, means: SequenceMeans
) -> list[str]:
    """Return what to know before the exported step is trained."""
    each, rows, found = batch.per_device_batch_size, train.micro_batch_size, []
    if train.layout == "packed" and batch.samples_per_sequence is None:
        found.append(
            f"The number of samples per packed sequence is unknown ({means.source}):"
            " the export assumes one, so its optimizer step has fewer tokens. Pass the"
            " dataset: --data DIR."
        )
    elif train.layout == "packed":
        found.append(
            f"{rows} packed sequences are not {rows} samples: each holds"
            f" {batch.samples_per_sequence:.2f} on average. The export accumulates"
            " gradients up to the same number of non-padding tokens."
        )
    if each < rows:
        found.append(
            f"Micro-batch size {each} instead of {rows}, to come closest to the global"
            " batch."
        )
    return [
        *found,
        (
            "The micro-batch was measured to fit with this project's trainer; the other"
            " may need more memory."
        ),
    ]
