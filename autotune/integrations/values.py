"""Request for a probe of your own training code."""

from dataclasses import dataclass
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.evidence.peak_contents import ContentsAt
from autotune.subjects.own.subject import OwnCode

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """Request to find the largest size of a step of yours.

    A field that is None takes the default of the machine.
    """

    code: OwnCode
    reports: Path
    memory_bytes: int | None = None
    headroom_share: float = HEADROOM_SHARE
    max_size: int = MAX_SIZE
    multiple_of: int = 1
    allow_varying: bool = False
    contents: ContentsAt = "none"
    starts_at_most: bool = False
    """True if ``max_size`` is tried first, because it is likely to fit."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    ranks: int | None = None
    """Ranks of this node that take the steps together; None for one."""
    measures_throughput: bool = True
    """False to search for the largest size alone."""
