"""Request for a plan."""

from dataclasses import dataclass
from pathlib import Path

from autotune.evidence.plan import Goal
from autotune.network.scaling import Assumed
from autotune.profiles.store import StoredProfile
from trainer.formats.train_config import TrainConfig

LINE_BITS_PER_S = 100e9
"""Assumed line rate of a node's NIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Request for a plan."""

    source: StoredProfile | TrainConfig
    """A profile, or settings of a model without one."""
    model_argument: str
    """Name of the model as you gave it, for commands."""
    goal: Goal | None
    """Length of the training; None means the steps of the profile, if it has any."""
    gpu: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    price_per_device_hour: float | None = None
    data: Path | None = None
    vocab_size: int | None = None
    global_batch_tokens: float | None = None
    links: Assumed | None = None
    units_per_s: float | None = None
    """Units/s of one rank, such as non-padding tokens/s, if given by the user."""
    tensor_ranks: int = 2
    pipeline_stages: int = 2
