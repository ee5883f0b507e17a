"""Explanation of one setting, as ``profile show`` prints it."""

from dataclasses import dataclass
from typing import Any, Literal

from autotune.evidence.advice import EvidenceFigure

Origin = Literal[
    "measured", "allocator", "constraint", "requested", "default", "changed"
]
"""Origin of a setting.

``measured``: measurements decided it. ``allocator``: the memory on a pretended GPU
decided it, as counted by torch's allocator. ``constraint``: it follows from your input.
``requested``: you set it by an option, and the figures hold only with it. ``default``:
it is the trainer's default. ``changed``: it was edited by hand or by ``autotune
advise``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A setting with its value, its origin and the reason for it."""

    key: str = ""
    """Dotted name of the setting, without ``train``.

    The functions that explain by one command's evidence leave ``key``, ``value`` and
    ``meaning`` empty; ``explanations`` sets them for all settings.
    """
    value: Any = None
    """Value of the setting in the profile."""
    origin: Origin
    """Origin of the value."""
    because: str
    """Reason for the value, in words."""
    evidence: tuple[EvidenceFigure, ...] = ()
    """Figures that the reason rests on."""
    rejected: tuple[str, ...] = ()
    """Alternatives that were measured, and the reasons against them."""
    meaning: str | None = None
    """Description of the setting in the schema; None for a key of a model's config."""
