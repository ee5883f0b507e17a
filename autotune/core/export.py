"""A profile as settings of another trainer: each setting with its equivalent there, or what is lost without one."""

from dataclasses import dataclass
from typing import Literal

from autotune.core.advice import Figure
from autotune.core.targets import Target

Equivalence = Literal["same", "near", "none"]
"""``same``: trains the same. ``near``: the other trainer's own way to much the same end. ``none``: is lost."""

Scalar = str | int | float | bool | None
Setting = Scalar | dict[str, Scalar]
"""What a JSON file of settings can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting or ability of this trainer, beside what the other one has in its place."""

    setting: str
    """The dotted key under ``[train]``, a whole table of it, or, where no key decides it, a few words."""
    ours: Scalar = None
    """What the profile says; None where it says nothing, or more than one value."""
    argument: str | None = None
    """The other trainer's name; None where its settings have none."""
    value: Setting = None
    """What is written there; None leaves it at the other trainer's default."""
    elsewhere: str | None = None
    """What to write in the program that calls the other trainer, where that is the place for it."""
    equivalence: Equivalence = "same"
    remark: str = ""
    """How the two differ, and what that costs in words."""
    worth: tuple[Figure, ...] = ()
    """What having it is worth, as far as the profile knows; empty where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsHold:
    """What a row holds, in the mean."""

    real_tokens: float | None
    """None where nobody knows."""
    samples: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBatch:
    """An optimizer step here and there. Here a row may hold many samples; there a row is one sample."""

    ranks: int
    rows_per_microbatch_per_rank: int
    rows_per_step: int
    samples_per_row: float | None
    """Mean; None where rows are packed and the dataset is not here."""
    samples_per_row_source: str
    real_tokens_per_row: float | None
    real_tokens_per_step: float | None
    """Over all ranks, as this trainer takes it."""
    fill_share: float | None
    """Of a row's places here, those that hold real tokens."""
    samples_per_microbatch_per_rank: int
    """Of the export."""
    accumulation_steps: int
    """Of the export."""
    exported_samples_per_step: int
    exported_real_tokens_per_step: float | None
    """None where ``samples_per_row`` is."""
    exported_fill_share: float | None
    """Where every sample is padded to a whole row; shorter micro-batches are narrower, and so fuller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Everything about one export."""

    target: Target
    written_for: str
    """The version of the other trainer that the names were checked against."""
    model: str
    nodes: int
    ranks_per_node: int
    batch: ExportedBatch
    arguments: dict[str, Setting]
    """What the other trainer reads."""
    settings: tuple[Equivalent, ...]
    warnings: tuple[str, ...]
    """What must be known before the export is trusted."""
