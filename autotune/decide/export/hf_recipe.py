"""The recipe as transformers' Trainer has it: optimizer, schedule, seeds. Pure."""

from autotune.core.export import Equivalent, Scalar
from autotune.decide.export.subject import Subject
from trainer.config import TrainConfig

_SAME_NUMBERS = (
    ("learning_rate", "learning_rate"),
    ("weight_decay", "weight_decay"),
    ("adam_beta1", "adam_beta1"),
    ("adam_beta2", "adam_beta2"),
    ("adam_epsilon", "adam_epsilon"),
    ("max_grad_norm", "max_grad_norm"),
    ("max_steps", "max_steps"),
    ("log_interval_steps", "logging_steps"),
)
"""Ours, theirs."""


def optimizer(subject: Subject) -> list[Equivalent]:
    """Fused AdamW in both."""
    plain = [
        Equivalent(setting=ours, ours=getattr(subject.train, ours), argument=theirs, value=getattr(subject.train, ours))
        for ours, theirs in _SAME_NUMBERS
    ]
    return [
        Equivalent(
            setting="fused AdamW", argument="optim", value="adamw_torch_fused",
            remark="biases and normalisation weights do not decay in either",
        ),
        *plain,
        Equivalent(
            setting="loss that is not finite is shown", argument="logging_nan_inf_filter", value=False,
            remark="otherwise its log shows the mean of the steps before instead",
        ),
    ]  # fmt: skip


def schedule(subject: Subject) -> list[Equivalent]:
    """Which of its schedules gives the same rates, with what arguments."""
    train = subject.train
    name, arguments = their_schedule(train)
    return [
        Equivalent(setting="schedule", ours=train.schedule, argument="lr_scheduler_type", value=name),
        Equivalent(
            setting="final_learning_rate_share", ours=train.final_learning_rate_share, argument="lr_scheduler_kwargs",
            value=arguments or None,
        ),
        Equivalent(setting="decay_share", ours=train.decay_share, remark="of wsd alone: in lr_scheduler_kwargs"),
        Equivalent(
            setting="warmup_steps", ours=train.warmup_steps, argument="warmup_steps", value=train.warmup_steps,
            equivalence="near" if train.warmup_steps else "same",
            remark=_of_warmup(train),
        ),
    ]  # fmt: skip


def their_schedule(train: TrainConfig) -> tuple[str, dict[str, Scalar]]:
    """The schedule that gives the same learning rates after the warm-up: its name and its own arguments."""
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


def _of_warmup(train: TrainConfig) -> str:
    if not train.warmup_steps:
        return ""
    if train.schedule == "wsd" and train.final_learning_rate_share:
        return "rises from the final rate rather than from 0, and its first step has that rate"
    return "its first step has rate 0, so it is one step behind while the rate rises"


def seed(subject: Subject) -> list[Equivalent]:
    """The same number, and other random numbers from it."""
    chosen = subject.train.seed
    return [
        Equivalent(
            setting="seed", ours=chosen, argument="seed", value=chosen, equivalence="near",
            remark="other first weights, order of samples and dropout from the same number",
        ),
        Equivalent(setting="order of the data", argument="data_seed", value=chosen, equivalence="near",
                   remark="a permutation of each epoch as well, and another one"),
    ]  # fmt: skip
