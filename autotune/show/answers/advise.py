"""What ``autotune advise --json`` answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.advice import Advice
from autotune.core.bottleneck import Bottleneck
from autotune.decide.advice import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What ``--apply`` wrote."""

    profile: str | None
    """The new profile; null where no change was safe."""
    of: str
    """The profile that was changed, which stays as it is."""
    kept: str | None
    """Where a profile that lay there before was kept."""
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseAnswer:
    """What limits, and every recommendation."""

    subject: str
    """The profile, run or directory that was looked at."""
    bottleneck: Bottleneck | None
    advice: tuple[Advice, ...]
    """The largest expected gain first."""
    applied: Applied | None
    """Null without ``--apply``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """With ``--rules``: one thing that is looked for."""

    rule: str
    covers: tuple[str, ...]
    """Recommendations of the paper, and bottlenecks."""
    looks_for: str


def rules_answer(rules: Sequence[Rule]) -> list[RuleAnswer]:
    """What is looked for."""
    return [RuleAnswer(rule=rule.name, covers=tuple(rule.covers), looks_for=rule.looks_for) for rule in rules]
