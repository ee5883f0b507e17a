"""Words that several kinds of sides share, so that their figures have equal names."""

READ_FROM = {
    "confirmed": "windows as training runs",
    "training": "windows with the tuned settings",
    "windows": "windows of the worker sweep",
    "steps": "steps of the probe",
}
"""Words for the origin of a rate."""
NOTHING_TIMED = (
    "its GPU is a pretended one: memory is that of torch's allocator, and there are no"
    " timings"
)
"""Note on a side that was measured on a pretended GPU."""
ALLOCATOR_MARK = ", allocator"
"""End of the name of a peak on a pretended GPU, which no peak of a real one matches."""


def counted(count: object, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``; the count may come from an untrusted file."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
