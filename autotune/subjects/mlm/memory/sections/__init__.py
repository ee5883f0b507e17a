"""Answers of ``autotune estimate``, and of ``autotune probe`` for a model."""

from autotune.subjects.mlm.memory.sections.estimate import estimate_text
from autotune.subjects.mlm.memory.sections.probe import probe_answer, probe_text

__all__ = ["estimate_text", "probe_answer", "probe_text"]
