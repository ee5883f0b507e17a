"""Report sections on memory.

``memory_breakdown``, ``throughput_curve`` and ``peak_contents`` are sections of a
report, ``shares`` is a table of a plan, and ``probe`` is what ``autotune probe``
prints.
"""

from autotune.memory.sections.memory_breakdown import memory_section
from autotune.memory.sections.peak_contents import peak_contents_section
from autotune.memory.sections.probe import probe_text
from autotune.memory.sections.shares import shares_table
from autotune.memory.sections.size_reasons import batch_split_words, reasons_of
from autotune.memory.sections.throughput_curve import curve_section

__all__ = [
    "batch_split_words",
    "curve_section",
    "memory_section",
    "peak_contents_section",
    "probe_text",
    "reasons_of",
    "shares_table",
]
