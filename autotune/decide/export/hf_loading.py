"""Model, data, loading and saving as transformers' Trainer has them. Pure."""

import math

from autotune.core.export import Equivalent
from autotune.decide.export.subject import Subject
from autotune.decide.export.worth import worth_of

_DROPOUT_KEYS = {"modernbert": "attention_dropout"}
_USUAL_DROPOUT_KEY = "attention_probs_dropout_prob"


def model(subject: Subject) -> list[Equivalent]:
    """The model is the caller's business there."""
    train = subject.train
    key = _DROPOUT_KEYS.get(subject.model_type, _USUAL_DROPOUT_KEY)
    given = "" if train.attention_dropout is None else f", {key}={train.attention_dropout:g}"
    make = f"AutoModelForMaskedLM.from_config(AutoConfig.for_model(**CONFIG{given}))"
    return [
        Equivalent(setting="model.name", ours=train.model.name, remark="names files, here and there"),
        Equivalent(
            setting="model.config", ours=subject.model_type, elsewhere=make,
            remark="CONFIG is [train.model.config] with the dataset's vocab_size",
        ),
        Equivalent(setting="model.null_keys", remark="keys of CONFIG that are None"),
        Equivalent(
            setting="attention_dropout", ours=train.attention_dropout,
            elsewhere=None if train.attention_dropout is None else f"{key}={train.attention_dropout:g} in CONFIG",
            remark="" if train.attention_dropout is not None else "the model's own in both",
        ),
    ]  # fmt: skip


def loader(subject: Subject) -> list[Equivalent]:
    """Loader processes: their number was counted for this project's loader, which does less for a batch."""
    data = subject.train.data
    workers = data.loader_workers > 0
    counted = subject.profile.evidence.workers is not None
    return [
        Equivalent(
            setting="data.loader_workers", ours=data.loader_workers, argument="dataloader_num_workers",
            value=data.loader_workers, equivalence="near" if counted else "same",
            remark="enough for this project's loader; its own masks and pads in Python, and may need more"
            if counted else "",
        ),
        Equivalent(
            setting="data.prefetch_batches", ours=data.prefetch_batches, argument="dataloader_prefetch_factor",
            value=data.prefetch_batches if workers else None,
            remark="" if workers else "nothing is fetched ahead without loader processes, here or there",
        ),
        Equivalent(
            setting="data.pin_memory", ours=data.pin_memory, argument="dataloader_pin_memory",
            value=data.pin_memory and subject.train.device == "cuda",
        ),
        Equivalent(
            setting="loader processes live on", argument="dataloader_persistent_workers",
            value=True if workers else None, remark="as they do here",
        ),
    ]  # fmt: skip


def layout(subject: Subject) -> list[Equivalent]:
    """What a row holds."""
    train = subject.train
    if train.layout == "bucketed":
        return [
            Equivalent(
                setting="layout", ours=train.layout, argument="train_sampling_strategy", value="group_by_length",
                equivalence="near",
                remark="takes samples of like length out of up to fifty batches, so the samples of a step are no "
                "longer drawn independently; here only the rows of one step are sorted",
                worth=worth_of(subject.profile, ["layout"]),
            ),
            _length(subject),
        ]  # fmt: skip
    if train.layout == "padded":
        return [Equivalent(setting="layout", ours=train.layout, remark="its default"), _length(subject)]
    return [
        Equivalent(
            setting="layout", ours=train.layout, equivalence="none",
            remark="packed rows without attention across documents: its encoders do not know where a document of a "
            "packed row ends, and would attend across. One padded sample for each row instead",
            worth=worth_of(subject.profile, ["layout"]),
        ),
        _length(subject),
    ]  # fmt: skip


def _length(subject: Subject) -> Equivalent:
    tokens = subject.train.seq_length_tokens
    return Equivalent(
        setting="seq_length_tokens",
        ours=tokens,
        elsewhere=f"tokenizer(…, truncation=True, max_length={tokens})",
        remark="its collator pads to the longest sample of a micro-batch",
    )


def collator(subject: Subject) -> list[Equivalent]:
    """Masking happens in the collator."""
    share = subject.train.masking_probability
    return [
        Equivalent(
            setting="masking_probability", ours=share, equivalence="near",
            elsewhere=f"DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability={share:g})",
            remark="80 % [MASK], 10 % random, 10 % kept in both; its masks depend on the order of the batches",
        ),
    ]  # fmt: skip


def saves(subject: Subject) -> list[Equivalent]:
    """When the state is saved and the model evaluated."""
    saving, evaluation = subject.train.checkpoint, subject.train.evaluation
    every, remark = _save_interval(subject)
    interval = evaluation.interval_steps
    return [
        Equivalent(
            setting="checkpoint.enabled", ours=saving.enabled, argument="save_strategy",
            value="steps" if saving.enabled else "no",
        ),
        Equivalent(
            setting="checkpoint.interval_s", ours=saving.interval_s, argument="save_steps",
            value=every if saving.enabled else None, equivalence="near", remark=remark,
        ),
        Equivalent(
            setting="checkpoint.interval_steps", ours=saving.interval_steps, equivalence="same",
            remark="in save_steps, where it is the shorter of the two",
        ),
        Equivalent(
            setting="checkpoint.keep_last", ours=saving.keep_last, argument="save_total_limit",
            value=saving.keep_last if saving.enabled else None,
        ),
        Equivalent(
            setting="evaluation.interval_steps", ours=interval, argument="eval_strategy",
            value="no" if interval is None else "steps",
        ),
        Equivalent(setting="steps between evaluations", ours=interval, argument="eval_steps", value=interval),
    ]  # fmt: skip


def _save_interval(subject: Subject) -> tuple[int | None, str]:
    """Steps between saves, and how they were found."""
    saving, step = subject.train.checkpoint, subject.step_s
    if step is None:
        none = "nothing was measured that tells how many steps fit into it; "
        if saving.interval_steps is None:
            return None, none + "its default, 500 steps"
        return saving.interval_steps, none + "checkpoint.interval_steps instead"
    seconds, source = step
    steps = max(1, math.floor(saving.interval_s / seconds))
    if saving.interval_steps is not None:
        steps = min(steps, saving.interval_steps)
    return steps, f"steps of {seconds:.3g} s by this project's trainer ({source}); the other one's take longer"
