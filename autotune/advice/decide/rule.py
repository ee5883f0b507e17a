"""A rule of advice: a function that looks for one problem, and what it covers."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.advice.decide.context import TrainingContext
from autotune.evidence.advice import Advice

Look = Callable[[TrainingContext], Advice | None]
"""Function that returns advice if a training has a problem, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """Rule that checks a training for one possible problem."""

    name: str
    covers: tuple[str, ...]
    """Recommendations of the paper (``R1`` to ``R5``) and bottlenecks that the rule
    covers."""
    looks_for: str
    looks: Look

    def __call__(self, now: TrainingContext) -> Advice | None:
        """Return the rule's advice; None if it has none."""
        return self.looks(now)


def rule(covers: str = "") -> Callable[[Look], AdviceRule]:
    """Return a decorator that makes a rule of a function.

    The rule has the function's name, and the first line of its docstring.

    Args:
        covers: Recommendations of the paper and bottlenecks that the rule covers,
            separated by commas.
    """

    def make_rule(look: Look) -> AdviceRule:
        return AdviceRule(
            name=look.__name__.replace("_", "-"),
            covers=tuple(filter(None, covers.split(", "))),
            looks_for=(look.__doc__ or "").splitlines()[0],
            looks=look,
        )

    return make_rule
