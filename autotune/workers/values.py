"""Request for a timed window of a subject's training."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from autotune.subjects.subject import Call
from autotune.trials.values import JobName, TrialRequest
from trainer.formats.tables import StrictTable


class CallTable(StrictTable):
    """A function of a subject with its arguments, as JSON."""

    function: str
    """``module:function``, or ``path/of/script.py:function``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments by name; those that the function does not take are left out."""

    @classmethod
    def of_call(cls, call: Call) -> "CallTable":
        """Return a call as JSON."""
        return cls(function=call.function, arguments=dict(call.arguments))


class WindowRequest(TrialRequest):
    """Request to train for a timed window with a loader, or on cached batches."""

    job: ClassVar[JobName] = "window"

    step: CallTable | None
    """Function that builds the step; None replays a step of ``replayed_step_s``."""
    loader: CallTable | None
    """Function that builds the loader, with the loader settings to try; None if the
    step has its own data, whose optimizer steps are then timed."""
    unit: str
    """Unit of the work that the step or the loader counts."""
    device: Literal["cpu", "cuda"]
    """Device of the step."""
    cached: bool
    """True if batches are cached, which gives the upper bound without data loading."""
    round: int
    """Number of the round, from 0; its windows read samples in the same order."""
    interleaved_with: list[str]
    """Names of all windows of the round."""
    window_s: float
    """Least duration of the window."""
    min_steps: int
    """Fewest optimizer steps of the window."""
    local_ranks: int
    """Ranks that train together on this node."""
    replayed_step_s: float | None
    """Time of a replayed micro-batch in seconds; None runs the step."""
    source_sha256: str
    """Hash of the source of your functions; empty for those of installed packages."""
    storage: str
    """Name of the storage that the data is read from; empty if it is unknown."""
    units_per_micro_batch: float = 1.0
    """Units of a micro-batch of a step that has its own data."""
    queued_batches: int = 0
    """Batches that the loader of such a step may hold ready, which the window must not
    begin with."""
