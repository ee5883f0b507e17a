"""Answers and report sections on memory.

``probe`` and ``estimate`` have the answers of the commands of the same name.
``memory_breakdown``, ``throughput_curve`` and ``peak_contents`` are sections of a
report, and ``shares`` is a table of a plan.
"""

from autotune.memory.sections.estimate import estimate_text
from autotune.memory.sections.memory_breakdown import memory_section
from autotune.memory.sections.peak_contents import peak_contents_section
from autotune.memory.sections.probe import probe_answer, probe_text
from autotune.memory.sections.shares import shares_table
from autotune.memory.sections.size_reasons import batch_split_words, reasons_of
from autotune.memory.sections.throughput_curve import curve_section

__all__ = [
    "batch_split_words",
    "curve_section",
    "estimate_text",
    "memory_section",
    "peak_contents_section",
    "probe_answer",
    "probe_text",
    "reasons_of",
    "shares_table",
]
