"""Advice with evidence: what is known of a training, looked at by a table of rules. Pure."""

from autotune.decide.advice.situation import DataFacts, Foreign, NodesMeant, Situation
from autotune.decide.advice.table import (
    NOTHING,
    RULES,
    TOO_LITTLE,
    AdviceRule,
    advise,
    changes_of,
    rank,
    safe_changes,
    with_changes,
)

__all__ = [
    "NOTHING", "RULES", "TOO_LITTLE", "AdviceRule", "DataFacts", "Foreign", "NodesMeant", "Situation", "advise",
    "changes_of", "rank", "safe_changes", "with_changes",
]  # fmt: skip
