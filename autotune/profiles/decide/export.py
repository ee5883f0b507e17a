"""Export of a profile to transformers 5.23's ``TrainingArguments``, and the settings without equivalent. Pure."""

import math
import sys
from dataclasses import dataclass
from typing import Literal

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig

_TORCHS_BUCKET_CAP_MIB = 25
"""Default of torch: if no size is given, it makes the first bucket smaller, so that it is sent early."""

Equivalence = Literal["same", "near", "none"]
"""``same``: trains the same. ``near``: has a similar effect in the other trainer. ``none``: is lost."""
Scalar = str | int | float | bool | None
Value = Scalar | list[str] | dict[str, Scalar]
"""Values that a JSON file of settings can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting or ability of this trainer, and its equivalent in the other one."""

    setting: str
    """Dotted key under ``[train]``, a whole table of it, or a few words if no key decides it."""
    argument: str | None
    """Name in the other trainer; None if it has none."""
    value: Value
    """Value in the other trainer; None leaves it at that trainer's default."""
    equivalence: Equivalence
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBatch:
    """Optimizer step in both trainers. Here a sequence may hold many samples; there it is one sample."""

    ranks: int
    sequences_per_step: int
    samples_per_sequence: float | None
    """Samples of a sequence, on average; None if sequences are packed and the dataset is not found."""
    tokens_per_step: float | None
    """Non-padding tokens of this trainer's optimizer step over all ranks."""
    per_device_batch_size: int
    gradient_accumulation_steps: int
    exported_samples_per_step: int
    exported_tokens_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Profile exported to transformers' Trainer."""

    written_for: str
    """Version of transformers whose names and meanings these are; a test builds real arguments from the result."""
    model: str
    nodes: int
    ranks_per_node: int
    batch: ExportedBatch
    arguments: dict[str, Value]
    calls: tuple[str, ...]
    """Code for the calling program, which no argument can express."""
    settings: tuple[Equivalent, ...]
    warnings: tuple[str, ...]


def export_profile(profile: Profile, means: SequenceMeans, *, nodes: int, ranks_per_node: int) -> Export:
    """Translate every setting of a profile; if the samples per sequence are not known, one is assumed."""
    train, batch = profile.train, exported_batch(profile, means, nodes * ranks_per_node)
    settings = (*_model(train), *_batch(train, batch), *_recipe(train), *_loading_and_saving(profile, batch))
    settings += (*_parallel(train, batch.ranks), *_absent(train))
    return Export(
        written_for="transformers 5.23", model=train.model.name, nodes=nodes, ranks_per_node=ranks_per_node,
        batch=batch, arguments={one.argument: one.value for one in settings if one.argument and one.value is not None},
        calls=_calls(train), settings=settings, warnings=tuple(_warnings(train, batch, means)),
    )  # fmt: skip


def exported_batch(profile: Profile, means: SequenceMeans, ranks: int) -> ExportedBatch:
    """Return the optimizer step of a profile, and the nearest one of whole samples.

    It keeps, in this order: at most as many sequences in a micro-batch as were verified to fit; the non-padding tokens
    of an optimizer step, as near as whole micro-batches of all ranks allow.
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
    known = means.non_padding_tokens / means.samples if means.non_padding_tokens and means.samples else None
    return ExportedBatch(
        ranks=ranks, sequences_per_step=rows, samples_per_sequence=means.samples,
        tokens_per_step=means.non_padding_tokens and rows * means.non_padding_tokens, per_device_batch_size=each,
        gradient_accumulation_steps=steps, exported_samples_per_step=exported,
        exported_tokens_per_step=known and exported * known,
    )  # fmt: skip


def _row(
    setting: str, argument: str | None = None, value: Value = None, *, near: str | bool = "", lost: str | bool = ""
) -> Equivalent:
    """Return one row of the table; a remark that is false is left out."""
    equivalence: Equivalence = "none" if lost else "near" if near else "same"
    return Equivalent(
        setting=setting, argument=argument, value=value, equivalence=equivalence, remark=str(lost or near or "")
    )


def _model(train: TrainConfig) -> tuple[Equivalent, ...]:
    on_gpu, fsdp = train.device == "cuda", train.parallel.strategy == "fsdp2"
    compiles, recomputes = train.compiled, train.activation_checkpointing != "none" and not fsdp
    also = train.activation_checkpointing == "selective" and "recomputes matmuls as well"
    return (
        _row("model"),
        _row("attention_dropout"),
        _row("device", "use_cpu", not on_gpu),
        _row("precision", "bf16", train.precision == "bf16"),
        _row("residual_dtype", lost=train.residual_dtype == "bf16" and "autocast keeps the residual stream in fp32"),
        _row("float8", lost=train.float8 != "none" and "computes linear layers in the precision of the others"),
        _row("fused_cross_entropy", lost=train.fused_cross_entropy and "holds all logits"),
        _row("tf32", "tf32", train.tf32 if on_gpu and train.precision == "fp32" else None),
        _row("compile", "torch_compile", compiles, near=compiles and "compiles the whole model at once"),
        _row("compile_mode", "torch_compile_mode", train.compile_mode if compiles else None),
        _row("activation_checkpointing", "gradient_checkpointing", recomputes or None, near=also),
        _row("run directory", "output_dir", f"runs/hf-{train.model.name}", near="without run record, steps and events"),
    )


def _batch(train: TrainConfig, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    each, steps = batch.per_device_batch_size, batch.gradient_accumulation_steps
    packed, bucketed = train.layout == "packed", train.layout == "bucketed"
    other = packed or each != train.micro_batch_size
    rounded = packed or batch.exported_samples_per_step != batch.sequences_per_step
    return (
        _row("micro_batch_size", "per_device_train_batch_size", each, near=other and "one sample per sequence"),
        _row("global_batch_size", "gradient_accumulation_steps", steps, near=rounded and "whole micro-batches only"),
        _row("global_batch_tokens"),
        _row("global_batch_samples"),
        _row("evaluation.max_sequences", "per_device_eval_batch_size", each, near="the whole dataset, other masks"),
        _row("layout", "train_sampling_strategy", "group_by_length" if bucketed else None,
             near=bucketed and "groups samples of similar length within 50 batches: steps are not independent draws",
             lost=packed and "packing would allow cross-document attention: one padded sample per sequence"),
        _row("seq_length_tokens"),
        _row("masking_probability", near="set in the collator; masks depend on the order of the batches"),
    )  # fmt: skip


def _recipe(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return the settings of optimizer, schedule and seeds."""
    numbers = (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps",
    )  # fmt: skip
    schedule, arguments = their_schedule(train)
    warmup = "its first step has learning rate 0: the warm-up lags by one step"
    if train.schedule == "wsd" and train.final_learning_rate_share:
        warmup = "its warm-up starts at the final learning rate instead of 0"
    return (
        *(_row(name, name, getattr(train, name)) for name in numbers),
        _row("log_interval_steps", "logging_steps", train.logged_steps),
        _row("log_to", "report_to", [*train.log_to] if train.log_to else None),
        _row("fused AdamW", "optim", "adamw_torch_fused"),
        _row("losses that are not finite are logged", "logging_nan_inf_filter", False),
        _row("schedule", "lr_scheduler_type", schedule),
        _row("final_learning_rate_share", "lr_scheduler_kwargs", arguments or None),
        _row("decay_share"),
        _row("warmup_steps", "warmup_steps", train.warmup_steps, near=train.warmup_steps > 0 and warmup),
        _row("seed", "seed", train.seed, near="the same seed gives other initial weights and dropout"),
        _row("order of the data", "data_seed", train.seed, near="a different permutation of each epoch"),
    )


def their_schedule(train: TrainConfig) -> tuple[str, dict[str, Scalar]]:
    """Return the name and arguments of the schedule with the same learning rates after the warm-up."""
    share = train.final_learning_rate_share
    if train.schedule == "constant" or (train.schedule == "linear" and share == 1):
        return "constant_with_warmup", {}
    if train.schedule == "linear":
        return ("linear", {}) if share == 0 else ("polynomial", {"lr_end": share * train.learning_rate, "power": 1.0})
    if train.schedule == "cosine":
        return ("cosine", {}) if share == 0 else ("cosine_with_min_lr", {"min_lr_rate": share})
    falling = max(1, round(train.decay_share * train.max_steps))
    steps = train.max_steps - max(train.warmup_steps, train.max_steps - falling)
    return "warmup_stable_decay", {"num_decay_steps": steps, "decay_type": "1-sqrt", "min_lr_ratio": share}


def _loading_and_saving(profile: Profile, batch: ExportedBatch) -> tuple[Equivalent, ...]:
    """Return data loading, checkpoints and evaluations; seconds between saves become steps at the measured rate."""
    train, data, saving = profile.train, profile.train.data, profile.train.checkpoint
    any_workers, interval = data.num_workers > 0, train.evaluation.interval_steps
    every, how = saving.interval_steps, "no measured step time to convert seconds into steps"
    if (step := _step_s(profile, batch)) is not None:
        every = min(max(1, math.floor(min(saving.interval_s / max(1e-9, step[0]), sys.maxsize))), every or sys.maxsize)
        how = f"steps of {step[0]:.3g} s by this project's trainer ({step[1]})"
    counted = profile.evidence.workers is not None
    return (
        _row("data.num_workers", "dataloader_num_workers", data.num_workers, near=counted and "requires more workers"),
        _row("data.prefetch_factor", "dataloader_prefetch_factor", data.prefetch_factor if any_workers else None),
        _row("data.pin_memory", "dataloader_pin_memory", data.pin_memory and train.device == "cuda"),
        _row("workers persist over epochs", "dataloader_persistent_workers", True if any_workers else None),
        _row("checkpoint.enabled", "save_strategy", "steps" if saving.enabled else "no"),
        _row("checkpoint.interval_s", "save_steps", every if saving.enabled else None, near=how),
        _row("checkpoint.interval_steps"),
        _row("checkpoint.keep_last", "save_total_limit", saving.keep_last if saving.enabled else None),
        _row("evaluation.interval_steps", "eval_strategy", "no" if interval is None else "steps"),
        _row("steps between evaluations", "eval_steps", interval),
    )


def _step_s(profile: Profile, batch: ExportedBatch) -> tuple[float, str] | None:
    """Return the seconds of this trainer's optimizer step and their source; None if nothing was measured."""
    tokens, rate, tuned = batch.tokens_per_step, expected_rate(profile, batch.ranks), tuned_rate(profile)
    if tokens is None:
        return None
    if rate is not None:
        return tokens / rate.value, f"{rate.known}: {rate.source}"
    if tuned is None:
        return None
    return tokens / (tuned.value * batch.ranks / tuned.ranks), f"assumed: per rank as fast as in {tuned.source}"


def _parallel(train: TrainConfig, ranks: int) -> tuple[Equivalent, ...]:
    settings, fsdp, bf16 = train.parallel, train.parallel.strategy == "fsdp2", train.precision == "bf16"
    timeout, bucket, half = math.ceil(settings.timeout_s), settings.bucket_cap_mib, settings.gradient_dtype != "fp32"
    config: dict[str, Scalar] = {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": train.activation_checkpointing != "none",
    }  # fmt: skip
    gradients = half and "synchronises gradients in fp32: twice the bytes"
    if fsdp and bf16:
        gradients = settings.gradient_dtype != "bf16" and "synchronises gradients in bf16, as bf16 is on"
    twice = settings.gradient_as_bucket_view and ranks > 1 and not fsdp
    hybrid = fsdp and settings.shard_ranks is not None
    named = not fsdp and bucket != _TORCHS_BUCKET_CAP_MIB
    return (
        _row("parallel.strategy", "fsdp", True if fsdp else None,
             near=fsdp and bf16 and "with bf16 it gathers weights and reduces gradients in bf16",
             lost=settings.strategy == "zero1" and "plain DDP: every rank holds the whole optimizer state"),
        _row("layers gathered one at a time", "fsdp_config", config if fsdp else None, near=fsdp and "other layers"),
        _row("parallel.shard_ranks", lost=hybrid and "HSDP: all ranks share one copy of the weights"),
        _row("parallel.gradient_dtype", lost=gradients),
        _row("parallel.bucket_cap_mib", "ddp_bucket_cap_mb", bucket if named else None),
        _row("parallel.gradient_as_bucket_view", lost=twice and "stores gradients twice, in DDP's buckets and outside"),
        _row("parallel.static_graph", "ddp_static_graph", True if settings.static_graph and not fsdp else None),
        _row("every parameter is used", "ddp_find_unused_parameters", None if fsdp else False),
        _row("no synchronisation of buffers", "ddp_broadcast_buffers", None if fsdp else False),
        _row("parallel.timeout_s", "ddp_timeout", timeout, near="kills the process after the timeout"),
    )  # fmt: skip


def _absent(train: TrainConfig) -> tuple[Equivalent, ...]:
    """Return features that no argument expresses, each with what happens instead if this profile uses it."""
    varlen = train.device == "cuda" and train.precision == "bf16" and train.layout == "packed"
    varlen = varlen if train.attention == "auto" else train.attention in {"varlen", "fa3"}
    masked, sparse = train.mlm_head == "sparse", train.model.config["model_type"] == "modernbert"
    saving, keeps = train.checkpoint, train.checkpoint.keep_every_steps is not None
    waits = saving.enabled and saving.asynchronous and "training waits for each checkpoint"
    every = "computes all positions"
    return (
        _row("mlm_head", near=masked and sparse and "sparse_prediction", lost=masked and not sparse and every),
        _row("last_layer", lost=masked and train.last_layer == "sparse" and every),
        _row("attention", lost=varlen and "computes whole padded sequences under a mask"),
        _row("masks depend on seed, epoch and sample only", lost="masks change with ranks, workers and resuming"),
        _row("exact resume with another number of ranks", lost="skips as many micro-batches as were trained on"),
        _row("data.dataset_hash", lost="accepts any dataset"),
        _row("data.path", lost="your program passes a dataset in its own format"),
        _row("data.stage_to", lost=train.data.stage_to is not None and "no staging to local disks"),
        _row("checkpoint.asynchronous", lost=waits),
        _row("checkpoint.keep_every_steps", lost=keeps and "save_total_limit deletes older ones"),
        _row("health", lost="a loss that is not finite, spikes or explodes is neither skipped nor rolled back"),
        _row("max_epochs", lost=train.max_epochs is not None and "only max_steps ends the run"),
        _row("stop_after_s", lost=train.stop_after_s is not None and "does not save and exit before the time limit"),
        _row("non-padding tokens/s and MFU of every step", lost="logs samples/s, padding included"),
    )


def _calls(train: TrainConfig) -> tuple[str, ...]:
    model_type = str(train.model.config["model_type"])
    given = ", sparse_prediction=True" if model_type == "modernbert" and train.mlm_head == "sparse" else ""
    if train.attention_dropout is not None:
        key = "attention_dropout" if model_type == "modernbert" else "attention_probs_dropout_prob"
        given += f", {key}={train.attention_dropout:g}"
    return (
        f"AutoModelForMaskedLM.from_config(AutoConfig.for_model(**CONFIG{given}))"
        "  # CONFIG: [train.model.config] with the dataset's vocab_size",
        f"tokenizer(…, truncation=True, max_length={train.seq_length_tokens})",
        f"DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability={train.masking_probability:g})",
    )


def _warnings(train: TrainConfig, batch: ExportedBatch, means: SequenceMeans) -> list[str]:
    each, rows, found = batch.per_device_batch_size, train.micro_batch_size, []
    if train.layout == "packed" and batch.samples_per_sequence is None:
        found.append(
            f"The number of samples per packed sequence is unknown ({means.source}): the export assumes one, so its "
            "optimizer step has fewer tokens. Pass the dataset: --data DIR."
        )
    elif train.layout == "packed":
        found.append(
            f"{rows} packed sequences are not {rows} samples: each holds {batch.samples_per_sequence:.2f} on average. "
            "The export accumulates gradients up to the same number of non-padding tokens."
        )
    if each < rows:
        found.append(f"Micro-batch size {each} instead of {rows}, to come closest to the global batch.")
    return [*found, "The micro-batch was measured to fit with this project's trainer; the other may need more memory."]
