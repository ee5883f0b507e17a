"""What each job is asked to measure: a command builds the request, a trial carries it as JSON, and the job reads it."""

from typing import Any, ClassVar, Self

from pydantic import Field

from autotune.trials.values import JobName, Trial
from trainer.config.tables import Table, parse_table
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import SpecialIds


class TrialRequest(Table):
    """Everything that defines a measurement."""

    job: ClassVar[JobName]

    def trial(self, *, timeout_s: float, **place: Any) -> Trial:  # noqa: ANN401 - JSON
        """Return the trial of this request, whose inputs lie at ``place``."""
        # Fields with a default came later; leaving defaults out keeps the keys of trials in older ledgers.
        fields = type(self).model_fields.items()
        defaults = {name for name, field in fields if not field.is_required() and getattr(self, name) == field.default}
        measured = self.model_dump(mode="json", exclude=defaults)
        return Trial(job=self.job, measured=measured, timeout_s=timeout_s, place=place)

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Self:
        """Read ``Trial.measured``.

        Raises:
            BadConfig: If a field is missing, unknown or of another type, or settings contradict each other.
        """
        return parse_table(cls, measured, where="trial")


class StepRequest(TrialRequest):
    """Take optimizer steps on random full rows under a memory budget."""

    job: ClassVar[JobName] = "step"

    config: TrainConfig
    """``micro_batch_rows`` is each rank's; the global batch sets the number of micro-batches in a step."""
    vocab_size: int
    special_ids: SpecialIds
    memory_budget_bytes: int | None
    """Budget of each rank; None means no limit."""
    warmup_steps: int
    timed_steps: int
    local_ranks: int
    documents_per_row: float
    attempt: int = 0
    """A number that makes a repeated trial another trial."""


class FeedRequest(TrialRequest):
    """Train for a window of time on the dataset, or on batches from memory."""

    job: ClassVar[JobName] = "feed"

    config: TrainConfig
    """The trainer's settings, with the loader settings to try."""
    cached: bool
    """Take batches from memory, which gives the ceiling."""
    round: int
    """Windows of the same round read rows in the same order."""
    beside: list[str]
    """Names of all windows of the round."""
    storage: str
    """File system that the dataset is read from."""
    window_s: float
    min_steps: int
    local_ranks: int
    replayed_step_s: float | None
    """Seconds that a micro-batch is replayed with; None runs the trainer's own step."""
    sample_delay_s: float
    """Delay added to the reading of each sample."""
    losses: bool = False
    """Report the loss of each step."""


class TraceRequest(TrialRequest):
    """Trace one rank's training steps on the meta device, for several micro-batch sizes."""

    job: ClassVar[JobName] = "trace"

    config: TrainConfig
    """The trainer's settings; ``sizes`` replaces ``micro_batch_rows``."""
    vocab_size: int
    special_ids: SpecialIds
    documents_per_row: float
    micro_batches: int
    """Micro-batches in an optimizer step; with two or more, gradients exist while later ones are computed."""
    ranks: int
    sizes: list[int] = Field(default_factory=list)
    """Rows of the micro-batch in each trace."""


class LinksRequest(TrialRequest):
    """Time messages of several sizes between ranks."""

    job: ClassVar[JobName] = "links"

    sizes_bytes: list[int]
    repeats: int
    seconds: float
    """Time limit for each size; no further message is sent after it."""
    nodes: int
    ranks_per_node: int


class ExchangeRequest(TrialRequest):
    """Train all ranks on the dataset's rows, from memory."""

    job: ClassVar[JobName] = "exchange"

    config: TrainConfig
    """The trainer's settings, with the gradient exchange to try."""
    steps: int
    travels: bool
    """Exchange gradients; False skips only that (DDP and ZeRO-1)."""
    round: int
    nodes: int
    ranks_per_node: int
