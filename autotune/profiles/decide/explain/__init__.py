"""Explanations of the settings of a profile. Pure.

A setting was measured, set by you, or left at its default. Begin with ``settings``,
which explains every setting by the evidence that decided it. The other modules explain
the settings that a command measures: ``batch_sizes`` (probe), ``explored``
(exploration), ``loader`` (worker sweep) and ``gradient_sync`` (network tuning).
``own_settings`` explains those of your own code.
"""

from autotune.profiles.decide.explain.explanation import Explanation
from autotune.profiles.decide.explain.settings import (
    explanations,
    meaning_of,
    select_explanations,
)

__all__ = ["Explanation", "explanations", "meaning_of", "select_explanations"]
