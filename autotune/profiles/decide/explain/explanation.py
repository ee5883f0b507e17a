"""Explanation of one setting, as ``profile show`` prints it."""

from dataclasses import dataclass
from typing import Any, Literal

from autotune.advice.values import EvidenceFigure

Origin = Literal[
    "measured", "allocator", "constraint", "requested", "default", "changed"
]
"""Origin of a setting. ``measured``: decided by measurements. ``allocator``: decided by
memory on a pretended GPU. ``constraint``: follows from your input. ``requested``: an
option, for which alone the figures hold. ``default``: the trainer's. ``changed``: none
of these, edited by hand or by ``autotune advise``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A setting with its value, its origin and the reason for it."""

    key: str = ""
    """Dotted name, without ``train``; ``explanations`` adds it, the value and the
    meaning."""
    value: Any = None
    origin: Origin
    because: str
    evidence: tuple[EvidenceFigure, ...] = ()
    rejected: tuple[str, ...] = ()
    """Alternatives that were measured, and the reasons against them."""
    meaning: str | None = None
    """Description of the setting in the schema; None for a key of a model's config."""
