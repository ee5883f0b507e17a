"""Table of an export: each setting with its equivalent in another trainer. Pure."""

from dataclasses import dataclass
from typing import Literal

Target = Literal["hf-trainer", "accelerate", "lightning"]
"""Trainer to export to: transformers' Trainer, a loop with accelerate, or Lightning's
Trainer."""
Equivalence = Literal["same", "near", "none"]
"""Effect of a setting in the other trainer: the ``same``, a similar one (``near``), or
``none``."""
Scalar = str | int | float | bool | None
Value = Scalar | list[str] | dict[str, Scalar]
"""Values that a JSON file of settings can hold."""


class Raw(str):
    """A value that is a Python expression, which code contains without quotes."""

    __slots__ = ()

    # ``written_calls`` writes the repr of each value, which puts quotes around a str.
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting or ability of this trainer, and its equivalent in the other one."""

    setting: str
    """Dotted key under ``[train]``, a whole table of it, or a few words if no key
    decides it."""
    argument: str | None
    """Name in the other trainer; None if it has none.

    A bare name, ``max_steps``, is an argument in the file of settings. A name with a
    function, ``AdamW(lr)``, is an argument that only code can pass; ``range()`` is a
    positional one.
    """
    value: Value
    """Value in the other trainer; None leaves it at that trainer's default."""
    equivalence: Equivalence
    """Effect in the other trainer."""
    remark: str
    """Difference of a similar effect, or what happens without an equivalent; empty if
    the setting means the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBatch:
    """Optimizer step in both trainers.

    Here a sequence may hold many samples, in the other trainer it is one sample.
    """

    ranks: int
    """Ranks over all nodes."""
    sequences_per_step: int
    """Sequences of this trainer's optimizer step over all ranks."""
    samples_per_sequence: float | None
    """Samples of a sequence, on average; None if sequences are packed and the dataset
    is not found."""
    tokens_per_step: float | None
    """Non-padding tokens of this trainer's optimizer step over all ranks."""
    per_device_batch_size: int
    """Samples of a rank's micro-batch in the other trainer."""
    gradient_accumulation_steps: int
    """Micro-batches of a rank in an optimizer step of the other trainer."""
    exported_samples_per_step: int
    """Samples of the other trainer's optimizer step over all ranks."""
    exported_tokens_per_step: float | None
    """Non-padding tokens of the other trainer's optimizer step; None if the samples of
    a sequence are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Profile exported to another trainer."""

    written_for: str
    """Libraries and versions whose names and meanings the export has."""
    model: str
    """Name of the model."""
    nodes: int
    """Nodes that train."""
    ranks_per_node: int
    """Ranks on each node."""
    batch: ExportedBatch
    """Optimizer step in both trainers."""
    arguments: dict[str, Value]
    """Content of the file of settings, by the other trainer's names."""
    calls: tuple[str, ...]
    """Lines of code for the calling program, for settings that the file cannot hold."""
    settings: tuple[Equivalent, ...]
    """Equivalent of every setting."""
    warnings: tuple[str, ...]
    """Sentences to read before training with the export."""


def row(
    setting: str,
    argument: str | None = None,
    value: Value = None,
    *,
    near: str | None = None,
    lost: str | None = None,
) -> Equivalent:
    """Return one row of the table of settings.

    Without ``near`` and ``lost``, the setting means the same in the other trainer.

    Args:
        setting: Dotted key of the setting, or a few words if no key decides it.
        argument: Name in the other trainer, as ``Equivalent`` describes it.
        value: Value in the other trainer; None leaves it at that trainer's default.
        near: Difference, if the other trainer only has a similar effect.
        lost: What happens instead, if the other trainer lacks the effect; it takes
            precedence over ``near``.
    """
    equivalence: Equivalence = "same"
    remark = ""
    if lost is not None:
        equivalence = "none"
        remark = lost
    elif near is not None:
        equivalence = "near"
        remark = near
    return Equivalent(
        setting=setting,
        argument=argument,
        value=value,
        equivalence=equivalence,
        remark=remark,
    )
