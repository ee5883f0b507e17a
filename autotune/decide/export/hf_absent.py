"""What transformers' Trainer has no setting for. Pure: a table, with a row for each and when it concerns a profile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.core.export import Equivalent, Scalar
from autotune.decide.export.subject import Rule, Subject
from autotune.decide.export.worth import worth_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absent:
    setting: str
    remark: str
    ours: Callable[[Subject], Scalar] = lambda _: None
    concerns: Callable[[Subject], bool] = lambda _: True
    """Whether this profile loses something; otherwise the setting is shown as the same."""
    otherwise: str = "off here as well"
    knobs: Sequence[str] = ()
    """Keys under ``[train]`` whose measured worth this is."""

    def __call__(self, subject: Subject) -> list[Equivalent]:
        lost = self.concerns(subject)
        return [
            Equivalent(
                setting=self.setting,
                ours=self.ours(subject),
                equivalence="none" if lost else "same",
                remark=self.remark if lost else self.otherwise,
                worth=worth_of(subject.profile, self.knobs) if lost and self.knobs else (),
            )
        ]


def _head(subject: Subject) -> list[Equivalent]:
    chosen = subject.train.head
    if chosen == "dense":
        return [Equivalent(setting="head", ours=chosen, remark="its default")]
    modernbert = subject.model_type == "modernbert"
    return [
        Equivalent(
            setting="head",
            ours=chosen,
            equivalence="near" if modernbert else "none",
            elsewhere="sparse_prediction=True in CONFIG" if modernbert else None,
            remark="computes the places to predict, whose number differs from batch to batch"
            if modernbert
            else "computes logits for every place rather than for those to predict, about one in seven: more memory "
            "and time, in proportion to the vocabulary (autotune estimate --head dense tells how much)",
            worth=worth_of(subject.profile, ["head"]),
        )
    ]


def _takes_varlen(subject: Subject) -> bool:
    train = subject.train
    if train.attention == "auto":
        return train.device == "cuda" and train.precision == "bf16" and subject.is_packed
    return train.attention == "varlen"


ABSENT: tuple[Rule, ...] = (
    _head,
    _Absent(
        setting="last_layer",
        ours=lambda subject: subject.train.last_layer,
        concerns=lambda subject: subject.train.last_layer == "predicted" and subject.train.head == "masked",
        remark="computes the last layer for every place rather than for those to predict",
        otherwise="all places in both",
        knobs=("last_layer",),
    ),
    _Absent(
        setting="attention",
        ours=lambda subject: subject.train.attention,
        concerns=_takes_varlen,
        remark="attention over whole padded rows under a mask, rather than over each sample on its own",
        otherwise="whole rows in both: attn_implementation='sdpa'",
        knobs=("attention",),
    ),
    _Absent(
        setting="masks that depend on seed, epoch and sample alone",
        remark="its masks change with the number of ranks, of loader processes, and with every resume",
    ),
    _Absent(
        setting="exact resume at another number of ranks",
        remark="it goes on by skipping as many micro-batches as were taken, which hold other samples at another number",
    ),
    _Absent(
        setting="data.dataset_hash",
        ours=lambda subject: subject.train.data.dataset_hash,
        remark="nothing refuses another dataset than the one that was tuned for",
    ),
    _Absent(setting="data.path", ours=lambda subject: subject.train.data.path,
            remark="the caller hands over a dataset; this project's shards are no such dataset"),
    _Absent(
        setting="data.stage_to",
        ours=lambda subject: subject.train.data.stage_to,
        concerns=lambda subject: subject.train.data.stage_to is not None,
        remark="no copy of the dataset on each node's own disk; autotune data stage makes one",
    ),
    _Absent(
        setting="checkpoint.asynchronous",
        ours=lambda subject: subject.train.checkpoint.asynchronous,
        concerns=lambda subject: subject.train.checkpoint.enabled and subject.train.checkpoint.asynchronous,
        remark="training waits until a checkpoint is written",
    ),
    _Absent(
        setting="checkpoint.keep_every_steps",
        ours=lambda subject: subject.train.checkpoint.keep_every_steps,
        concerns=lambda subject: subject.train.checkpoint.keep_every_steps is not None,
        remark="older checkpoints than save_total_limit are all deleted",
    ),
    _Absent(
        setting="health",
        remark="a loss that is not finite, a spike, an explosion or a plateau is neither told, skipped nor rolled back",
    ),
    _Absent(
        setting="max_epochs",
        ours=lambda subject: subject.train.max_epochs,
        concerns=lambda subject: subject.train.max_epochs is not None,
        remark="max_steps alone ends its run",
    ),
    _Absent(
        setting="stop_after_s",
        ours=lambda subject: subject.train.stop_after_s,
        concerns=lambda subject: subject.train.stop_after_s is not None,
        remark="it does not save and leave by itself before a time limit",
    ),
    _Absent(
        setting="throughput in real tokens/s, MFU and waiting in every step",
        remark="its log has samples and steps per second, padding included",
    ),
)  # fmt: skip
