"""Requests for trials of a step: its memory and speed, its kernels, its traces."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from autotune.trials.values import JobName, TrialRequest


class StepRequest(TrialRequest):
    """Request for optimizer steps of a subject, under a memory budget."""

    job: ClassVar[JobName] = "step"

    function: str
    """``module:function`` that builds the step."""
    arguments: dict[str, Any]
    """Arguments of ``function``, the size included."""
    size: int
    """Size that is tried, in the unit of the subject."""
    units_per_size: float
    """Units of throughput that one more of the size adds."""
    source_sha256: str
    """Hash of the source of ``function``; empty if it is this project's."""
    device: Literal["cpu", "cuda"]
    memory_budget_bytes: int | None
    """Memory budget of each rank; None means no limit."""
    warmup_steps: int
    """Untimed optimizer steps, before the timed ones."""
    timed_steps: int
    """Timed optimizer steps."""
    local_ranks: int = 1
    """Ranks of this node, which take the steps together."""
    attempt: int = 0
    """Number of earlier attempts, which makes a repeated trial another trial."""
    threads: int | None = None
    """CPU threads of each rank; None for as many as its ranks get."""
    attribute: bool = False
    """True to record the contents of memory at the last step's peak, or when it runs
    out: such a trial does not show whether a size fits."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the trial, warm-up included."""
        return self.warmup_steps + self.timed_steps


class KernelsRequest(StepRequest):
    """Request for the kernels of optimizer steps, as of a ``StepRequest``."""

    job: ClassVar[JobName] = "kernels"

    document_tokens: float | None = None
    """Tokens of a document on average, from which the work of attention follows; None
    if it is unknown."""


class ModelTraceRequest(TrialRequest):
    """Request for traces of a model that a function builds, for several sizes."""

    job: ClassVar[JobName] = "model_trace"

    model: str
    """``module:function``, which returns a module and its batch."""
    arguments: dict[str, Any]
    along: str
    """Argument that is the size."""
    device: Literal["cpu", "cuda"]
    directory: str
    sizes: list[int] = Field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.model

    @property
    def slots_of(self) -> None:
        """None: a model of yours has no sparse MLM head that is known here."""
        return None
