"""Request for the settings that a subject has without tuning."""

from typing import ClassVar

from autotune.trials.values import JobName, TrialRequest
from autotune.workers.values import CallTable


class UntunedRequest(TrialRequest):
    """Request for the size and the loader settings of a subject before tuning."""

    job: ClassVar[JobName] = "untuned"

    call: CallTable
    """Function that returns them."""
    source_sha256: str
    """Hash of the source of your functions."""
