"""What ``autotune report build`` and ``autotune report review`` answer with ``--json``."""

from dataclasses import dataclass

from autotune.core.review import Review, State


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAnswer:
    """``report build``: where the three forms of a report lie."""

    report: str
    """The same as ``html``."""
    html: str
    markdown: str
    json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """``report review``: how a profile stands."""

    profile: str
    content_sha256: str
    """Of what the profile says now."""
    intact: bool
    """Whether that is what it was written with."""
    state: State
    reviews: list[Review]
    """Every verdict on a profile of this name, oldest first."""
