"""All rules of `advise`, and their recommendations ordered by expected gain. Pure."""

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
    found = [
        replace(advice, rule=rule.name)
        for rule in RULES
        if (advice := rule.looks(now)) is not None
    ]
    found = [_in_your_words(now, advice) for advice in found]
    if not now.intact:  # its figures are for other settings
        found = [replace(one, safe=False) for one in found]
    if all(one.severity == "info" for one in found):
        found.append(_nothing_to_do(now))
    first_by_target: dict[tuple[str, ...], Advice] = {}
    for advice in sorted(found, key=rank):
        first = first_by_target.setdefault(advice.target, advice)
        if first is not advice:
            added = [one for one in advice.evidence if one not in first.evidence]
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
    """Return that no rule asks for a change, and what keeps it from being the last."""
    step = now.step_kernels
    if step is None:
        reason = "the kernels of the step were not profiled (autotune tune does it)"
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
