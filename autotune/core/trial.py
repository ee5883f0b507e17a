"""What is to be measured. Two trials with the same key measure the same thing, so a repeated command can resume."""

from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.outcome import Measured, Outcome
from trainer.schema import canonical_sha256

JobName = Literal["step", "feed", "matmul", "fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job for one child process."""

    job: JobName
    measured: dict[str, Any]
    """Everything that defines the measurement, as JSON; the key is taken over it."""
    timeout_s: float
    place: dict[str, Any] = field(default_factory=dict)
    """Where inputs lie on this machine; the same measurement elsewhere has the same key."""

    @property
    def key(self) -> str:
        """SHA-256 of what is measured."""
        return canonical_sha256({"job": self.job, "measured": self.measured})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial with what became of it."""

    trial: Trial
    outcome: Outcome
    seconds: float
    label: str
    """What it was for, in a few words."""
    from_ledger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a ``step`` job: optimizer steps on random full rows."""

    optimizer_steps: int
    """Steps that really ran, warm-up included."""
    step_s: tuple[float, ...]
    """Seconds of each timed step."""
    slot_tokens_per_step: int
    peak_bytes: int
    """Highest use of the budget: on CUDA the allocator's reserve and what lies outside it; on a CPU the growth of the
    process since before the model was built."""
    outside_allocator_bytes: int | None
    """Device memory that the allocator does not count (context, workspaces); None on a CPU."""
    loss: float

    @classmethod
    def of(cls, outcome: Measured) -> "StepFigures":
        """Read the figures of a measured step trial."""
        return cls(**outcome.figures | {"step_s": tuple(outcome.figures["step_s"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFigures:
    """Figures of a ``feed`` job: optimizer steps on the dataset's own rows."""

    optimizer_steps: int
    """Steps that really ran, discarded ones included."""
    discarded_steps: int
    """Steps before the window: warm-up, and whatever the queues held ready."""
    real_tokens_per_s: float
    slot_tokens_per_s: float
    data_wait_share: float
    """Part of the window's time in which the step waited for data, 0 to 1."""
    step_s: tuple[float, ...]
    window_start_s: float
    """CLOCK_MONOTONIC, so that another process can cut its own samples to the window."""
    window_end_s: float

    @classmethod
    def of(cls, outcome: Measured) -> "FeedFigures":
        """Read the figures of a measured feed trial."""
        return cls(**outcome.figures | {"step_s": tuple(outcome.figures["step_s"])})
