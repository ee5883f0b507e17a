"""Table of a target: each setting with its equivalent in another trainer. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from autotune.evidence.profile import Profile
from trainer.formats.train_config import TrainConfig

Equivalence = Literal["same", "near", "none"]
"""Effect of a setting in the other trainer: the ``same``, a similar one (``near``), or
``none``."""
Scalar = str | int | float | bool | None
Value = Scalar | list[str] | dict[str, Scalar]
"""Values that a JSON file of settings can hold."""


class Raw(str):
    """A value that is a Python expression, which code contains without quotes."""

    __slots__ = ()

    # Code has the repr of each value, which puts quotes around a str.
    __repr__ = str.__str__


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
class RunToExport:
    """Run of this trainer that an export translates: the input of every row."""

    profile: Profile
    batch: ExportedBatch
    nodes: int
    """Nodes that train."""
    fsdp: bool
    """True if the target trains with FSDP."""

    @property
    def train(self) -> TrainConfig:
        """Settings of the trainer."""
        return self.profile.train

    @property
    def ranks(self) -> int:
        """Ranks over all nodes."""
        return self.batch.ranks

    @property
    def on_gpu(self) -> bool:
        """True if the run trains on GPUs."""
        return self.train.device == "cuda"

    @property
    def has_bf16(self) -> bool:
        """True if the run computes in bf16."""
        return self.train.precision == "bf16"

    @property
    def checkpoints_activations(self) -> bool:
        """True if the run recomputes activations in the backward pass."""
        return self.train.activation_checkpointing != "none"


Argument = str | Callable[[RunToExport], str | None] | None
"""Name in the other trainer, or a function that returns it.

A bare name, ``max_steps``, is an argument in the file of settings. A name with a
function, ``AdamW(lr)``, is an argument that only code can pass; ``range()`` is a
positional one. A function returns None if the run does not pass the setting.
"""
Remark = str | Callable[[RunToExport], str | None] | None
"""Remark of a row, or a function that returns it; None if it does not apply."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting or ability of this trainer, and how a target expresses it.

    Without ``near`` and ``lost``, the setting means the same in the target. A row
    without argument and remarks is a setting whose effect is that of other rows.
    """

    setting: str
    """Dotted key under ``[train]``, a whole table of it, or a few words if no key
    decides it."""
    argument: Argument = None
    value: Value | Callable[[RunToExport], Value] = None
    """Value in the target, or a function that returns it; None passes the setting's own
    value. A function returns None to leave the argument at the target's default."""
    _: KW_ONLY
    near: Remark = None
    """Difference, if the target only has a similar effect."""
    lost: Remark = None
    """Consequence, if the target lacks the effect; takes precedence over
    ``near``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """Trainer to export to."""

    written_for: str
    """Libraries and versions whose names the export has."""
    rows: tuple[SettingRow, ...]
    """Row of every setting; arguments of the file and of code are in this order."""
    code: Mapping[str, str]
    """Code of the calling program, by the function that the arguments of rows name.

    ``{}`` stands for its arguments; code with ``{}`` is left out if it has none.
    """
    fsdp_on_cpus: bool
    """True if the target can train with FSDP on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting or ability of this trainer, and its equivalent in the other one."""

    setting: str
    """Setting of the row."""
    argument: str | None
    """Name in the other trainer, as ``Argument`` describes it; None if it has none."""
    value: Value
    """Value in the other trainer; None leaves it at that trainer's default."""
    equivalence: Equivalence
    """Effect in the other trainer."""
    remark: str
    """Difference of a similar effect, or what happens without an equivalent; empty if
    the setting means the same."""


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
