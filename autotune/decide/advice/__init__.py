"""Advice with evidence: what is known of a training, looked at by a table of rules. Pure."""

from autotune.decide.advice.situation import DataFacts, Foreign, Situation, Spread
from autotune.decide.advice.table import NOTHING, RULES, Rule, advise, rank

__all__ = ["NOTHING", "RULES", "DataFacts", "Foreign", "Rule", "Situation", "Spread", "advise", "rank"]
