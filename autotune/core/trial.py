"""What is to be measured. Two trials with the same key measure the same thing, so a repeated command can resume."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.core.gpu_use import GpuUseFigures
from autotune.core.outcome import Measured, Outcome, outcome_from_json
from trainer.errors import BadConfig
from trainer.schema import Table, canonical_sha256, parse_table

JobName = Literal["step", "feed", "matmul", "fault", "trace"]


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


class TrialRecord(Table):
    """A trial as the ledger keeps it."""

    time_utc: str
    site: str
    """Where it was measured: machine, software, model and dataset, as a hash."""
    key: str
    job: JobName
    measured: dict[str, Any]
    label: str
    outcome: dict[str, Any]
    seconds: Annotated[float, Field(ge=0)]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "TrialRecord | None":
        """Read a record; None if it is no trial of this version of the project."""
        try:
            found = parse_table(cls, record, where="ledger")
            outcome = outcome_from_json(found.outcome)
            if isinstance(outcome, Measured) and found.job in _FIGURES:
                _FIGURES[found.job].of(outcome)
        except (BadConfig, ValueError, KeyError, TypeError):
            return None
        return found

    def finished(self) -> FinishedTrial:
        """The trial and what became of it."""
        return FinishedTrial(
            trial=Trial(job=self.job, measured=self.measured, timeout_s=0.0),
            outcome=outcome_from_json(self.outcome),
            seconds=self.seconds,
            label=self.label,
            from_ledger=True,
        )


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
    local_ranks: int = 1
    """Ranks that took the steps together; the figures are the job's: all ranks' tokens, the slowest rank's seconds, and
    the most that any rank used."""
    peak_bytes_by_rank: tuple[int, ...] = ()
    """Empty in ledgers from before ranks were told apart."""

    @classmethod
    def of(cls, outcome: Measured) -> "StepFigures":
        """Read the figures of a measured step trial."""
        figures = outcome.figures
        by_rank = tuple(figures.get("peak_bytes_by_rank", ()))
        return cls(**figures | {"step_s": tuple(figures["step_s"]), "peak_bytes_by_rank": by_rank})


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedFigures:
    """Figures of a ``feed`` job: a window of optimizer steps on the dataset's own rows, of all local ranks together."""

    optimizer_steps: int
    """Steps that really ran, discarded ones included."""
    discarded_batches: int
    """Taken before the window: what the queues held ready, twice over, and warm-up."""
    steps: int
    """In the window."""
    real_tokens_per_s: float
    slot_tokens_per_s: float
    data_wait_share: float
    """Part of the window's time in which devices had nothing to do but wait for data, all ranks' added up, 0 to 1: what
    data costs at most, as a rank that waits holds up the others."""
    window_start_s: float
    """CLOCK_MONOTONIC, so that another process can cut its own samples to the window."""
    window_end_s: float
    local_ranks: int
    micro_batches_per_step: int
    memory_bytes: int | None
    """Of the ranks and their loader workers, shared pages counted in parts; None where it cannot be read."""
    worker_bytes: int | None
    """What the largest loader worker has for itself; None where there is none."""
    storage_bytes_per_s: float | None
    """What the kernel read from storage for them; None where it does not count."""
    page_cache_share: float | None
    """Part of the dataset that lay in memory before the window; None where nobody can say."""
    gpus: tuple[GpuUseFigures, ...] = ()
    """What each GPU did in the window; empty without one."""

    @classmethod
    def of(cls, outcome: Measured) -> "FeedFigures":
        """Read the figures of a measured feed trial."""
        names = {field.name for field in fields(GpuUseFigures)}
        gpus = tuple(
            GpuUseFigures(**{name: value for name, value in one.items() if name in names})
            for one in outcome.figures.get("gpus", ())
        )
        return cls(**outcome.figures | {"gpus": gpus})


_FIGURES: dict[str, type[StepFigures] | type[FeedFigures]] = {"step": StepFigures, "feed": FeedFigures}
