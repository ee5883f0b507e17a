"""All rules of `advise`, and their recommendations ordered by expected gain. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from autotune.advice.decide import (
    batch_size,
    communication,
    computation,
    condition,
    data_loading,
    kernels,
)
from autotune.advice.decide.context import TrainingContext
from autotune.advice.decide.rule import AdviceRule
from autotune.base.severity import SEVERITIES
from autotune.base.units import format_percent
from autotune.evidence.advice import Advice, EvidenceFigure
from autotune.kernels.decide.bounds import NEAR_BOUND_RATIO, is_near_bound
from autotune.kernels.decide.words import bound_words

_MODULES = (data_loading, batch_size, computation, kernels, communication, condition)


def _rules_of(module: ModuleType) -> list[AdviceRule]:
    return [value for value in vars(module).values() if isinstance(value, AdviceRule)]


RULES = tuple(rule for module in _MODULES for rule in _rules_of(module))
"""All rules: every function with the decorator ``rule`` in one of the modules."""
NOTHING = "change-nothing"
"""Name of the result that no change is expected to pay."""
NOT_JUDGED = "not-judged"
"""Name of the result that no rule asks for a change, while the step may have room."""
TOO_LITTLE = "too-little-known"
"""Name of the result that too little was measured."""


def advise(now: TrainingContext) -> tuple[Advice, ...]:
    """Return all advice, ordered by ``rank``.

    If no advice asks for a change, an info says so. Rules that recommend the same
    change give one recommendation, with the evidence of all of them.
    """
    recommendations = []
    for rule in RULES:
        advice = rule.looks(now)
        if advice is not None:
            named = _in_your_words(now, replace(advice, rule=rule.name))
            recommendations.append(named)
    if not now.intact:
        # The figures of a modified profile are those of other settings.
        recommendations = [replace(advice, safe=False) for advice in recommendations]
    if all(advice.severity == "info" for advice in recommendations):
        recommendations.append(_nothing_to_do(now))
    return _joined(sorted(recommendations, key=rank))


def _joined(ordered: Sequence[Advice]) -> tuple[Advice, ...]:
    """Join advice to change the same, with the evidence of all of it.

    Args:
        ordered: Advice, the most important first.
    """
    first_by_target: dict[tuple[str, ...], Advice] = {}
    for advice in ordered:
        first = first_by_target.get(advice.target)
        if first is None:
            first_by_target[advice.target] = advice
            continue
        added = [figure for figure in advice.evidence if figure not in first.evidence]
        first_by_target[advice.target] = replace(
            first, evidence=(*first.evidence, *added)
        )
    return tuple(first_by_target.values())


def _in_your_words(now: TrainingContext, advice: Advice) -> Advice:
    """Return the advice with the names of its settings in your code."""
    changes = tuple(
        replace(change, argument=now.arguments.get(change.key))
        for change in advice.changes
    )
    return replace(advice, changes=changes)


def rank(advice: Advice) -> tuple[bool, float, int]:
    """Return a sort key: errors first, then the largest speedup, then the severity."""
    speedup = 1.0 if advice.gain is None else advice.gain.speedup
    return advice.severity != "error", -speedup, SEVERITIES.index(advice.severity)


def _nothing_to_do(now: TrainingContext) -> Advice:
    if now.bottleneck is None or not now.bottleneck.decided:
        return Advice(
            rule=TOO_LITTLE,
            severity="info",
            claim="the bottleneck is not known: too little was measured",
            cost="minutes on this machine",
            command=now.workers_command() if now.run is None else None,
            would_change=(
                "a sweep of DataLoader workers or a longer run: both measure the parts"
                " of a step"
            ),
        )
    largest = now.bottleneck.parts[0]
    evidence = now.part_figure(largest, f"largest part of the step: {largest.cause}")
    step = now.step_kernels
    if step is None or not is_near_bound(step):
        return _not_judged(now, evidence)
    return Advice(
        rule=NOTHING,
        severity="info",
        claim=f"no change is expected to pay: {bound_words(step)}",
        evidence=(evidence,),
        cost="none",
        command=now.use_command,
        would_change="another machine, model or dataset, or further measurements",
    )


def _not_judged(now: TrainingContext, evidence: EvidenceFigure) -> Advice:
    """Return the advice that no rule asks for a change, with the reason for doubt."""
    step = now.step_kernels
    if step is None:
        reason = "the kernels of the step were not profiled"
    else:
        reason = bound_words(step)
    return Advice(
        rule=NOT_JUDGED,
        severity="info",
        claim=(
            "no rule asks for a change; whether the step could be faster is not"
            f" judged: {reason}"
        ),
        evidence=(evidence,),
        cost="none",
        command=now.use_command,
        would_change=(
            "a step within"
            f" {format_percent(NEAR_BOUND_RATIO - 1)} of the sum of its kernels' bounds"
        ),
    )
