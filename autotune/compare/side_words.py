"""Words that several kinds of sides share, so that their figures have equal names."""

from autotune.machine.values import MeasuredGpu

READ_FROM = {
    "confirmed": "windows as training runs",
    "training": "windows with the tuned settings",
    "windows": "windows of the worker sweep",
    "steps": "steps of the probe",
}
"""Words for the origin of a rate."""


def allocator_mark(gpu: MeasuredGpu) -> str:
    """Return the end of the name of a peak that only torch's allocator knows.

    Such peaks are not compared with those of a GPU that takes time.
    """
    return "" if gpu.takes_time else ", allocator"


def counted(count: object, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``; the count may come from an untrusted file."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
