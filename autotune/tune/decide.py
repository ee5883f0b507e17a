"""Time budget of a tuning's phases, and an estimate of the time left. Pure."""

from collections.abc import Sequence

from autotune.trials.decide.least_time import USUAL_S, StageName
from autotune.tune.values import BUDGET_WEIGHTS, Stage


def share_s(stages: Sequence[Stage], stage: Stage, left_s: float) -> float | None:
    """Return the phase's part of the seconds left, shared with waiting phases.

    Returns:
        The part, or None if it is not bounded.
    """
    weight = BUDGET_WEIGHTS.get(stage.name)
    if weight is None:
        return None
    waiting = [one for one in stages if not one.over and one is not stage]
    total = weight + sum(BUDGET_WEIGHTS.get(one.name, 0.0) for one in waiting)
    fixed_s = sum(
        _usual_s(stages, one.name) for one in waiting if one.name not in BUDGET_WEIGHTS
    )
    return max(0.0, (left_s - fixed_s) * weight / total)


def left_s(stages: Sequence[Stage], budget_left_s: float) -> float:
    """Return the approximate seconds left.

    They are the usual times of unbounded phases, and the budgets of the others.
    """
    rest = 0.0
    for one in (stage for stage in stages if not stage.over):
        may_s = (
            one.budget_s
            if one.budget_s is not None
            else share_s(stages, one, budget_left_s)
        )
        usual_s = _usual_s(stages, one.name) if may_s is None else may_s
        if one.expected and one.done:
            usual_s = min(
                usual_s if may_s is not None else float("inf"),
                one.seconds / one.done * one.expected,
            )
        rest += max(0.0, usual_s - one.seconds)
    return rest


def _usual_s(stages: Sequence[Stage], name: StageName) -> float:
    known = (one.seconds for one in stages if one.name == name and one.status == "done")
    return max(known, default=USUAL_S.get(name, 0.0))
