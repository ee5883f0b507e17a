"""Answers and report sections on memory.

``probe`` has the answers of ``autotune probe``, ``estimate`` those of ``autotune
estimate``, and ``report`` the sections of a report.
"""

from autotune.memory.sections.estimate import estimate_text, shares_table
from autotune.memory.sections.probe import (
    ProbedModel,
    batch_split_words,
    probe_answer,
    probe_text,
    reasons_of,
)
from autotune.memory.sections.report import curve_section, memory_section

__all__ = [
    "ProbedModel",
    "batch_split_words",
    "curve_section",
    "estimate_text",
    "memory_section",
    "probe_answer",
    "probe_text",
    "reasons_of",
    "shares_table",
]
