"""Request for the links between ranks."""

from typing import ClassVar

from autotune.trials.values import JobName, TrialRequest


class LinksRequest(TrialRequest):
    """Request to time all-reduces of several sizes between ranks."""

    job: ClassVar[JobName] = "links"

    sizes_bytes: list[int]
    repeats: int
    seconds: float
    """Time limit for each size."""
    nodes: int
    ranks_per_node: int
