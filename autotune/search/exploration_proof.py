"""Whether a candidate is faster than the unexplored settings, and learns the same."""

from dataclasses import dataclass, replace
from typing import Any

from autotune.core.knobs import EQUAL_TO_THE_BIT_OR_ORDER, KNOBS, Knobs
from autotune.core.outcome import Measured, describe
from autotune.core.trial import FeedFigures
from autotune.decide.equal_loss import CHECK_WARM_UP_STEPS, LOSS_STEPS, compare_losses, fell_too_little
from autotune.decide.resampling import paired_ratio
from autotune.decide.statistics import Interval
from autotune.search.exploration_known import Known
from autotune.search.exploration_windows import Windows

FIRST_VERIFYING, MOST_VERIFYING = 4, 12
UNKNOWN = Interval(value=1.0, low=None, high=None)
"""Of what did not run, or was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search came to."""

    candidate: Knobs
    """What promised most; the unexplored settings where nothing did."""
    ratio: Interval
    """Of the candidate to the unexplored settings, with 98 % bounds."""
    equal_loss: str | None
    adopted: bool
    refused: str | None = None
    """Why it is not taken although it is faster."""


def prove(candidate: Knobs, known: Known, windows: Windows) -> Explored:
    """Hold a candidate against the unexplored settings; where it rounds differently, in what it learns as well."""
    if candidate == known.unexplored:
        return Explored(candidate=candidate, ratio=UNKNOWN, equal_loss=None, adopted=False)
    ratio = _verify(candidate, known, windows)
    faster = ratio.low is not None and ratio.low > 1.0
    if not faster or not _rounds_differently(candidate, known.unexplored):
        return Explored(candidate=candidate, ratio=ratio, equal_loss=None, adopted=faster)
    equal, told = _check_loss(candidate, windows)
    return Explored(candidate=candidate, ratio=ratio, equal_loss=told, adopted=equal, refused=None if equal else told)


def _verify(candidate: Knobs, known: Known, windows: Windows) -> Interval:
    """Windows of both in turn, until they differ or enough of them do not."""
    pairs: list[tuple[float, float]] = []
    while True:
        outcomes = windows.read([candidate, known.unexplored], short=False)
        rates = windows.rates(outcomes)
        known.note(rates, short=False)
        if candidate not in rates:
            known.failed(candidate, outcomes[candidate])
            return UNKNOWN
        pairs.append((rates[candidate], rates[known.unexplored]))
        ratio = paired_ratio(pairs)
        differs = ratio.low is not None and ratio.high is not None and not ratio.low <= 1.0 <= ratio.high
        late = windows.seconds >= windows.request.windows.budget_s
        if len(pairs) >= MOST_VERIFYING or (len(pairs) >= FIRST_VERIFYING and (differs or late)):
            return ratio


def _rounds_differently(candidate: Knobs, unexplored: Knobs) -> bool:
    exact = EQUAL_TO_THE_BIT_OR_ORDER
    return any(getattr(candidate, name) != getattr(unexplored, name) for name in KNOBS if name not in exact)


def _check_loss(candidate: Knobs, windows: Windows) -> tuple[bool, str]:
    """Train both ways to round from one start on the same rows, at the unexplored micro-batch."""
    unexplored = windows.request.unexplored
    every: list[tuple[float, ...]] = []
    names = f"{unexplored.precision}", f"{candidate.precision}"
    for precision in (unexplored.precision, candidate.precision):
        label = f"equal loss, {precision}"
        cell = replace(unexplored, precision=precision)
        config = windows.request.config_of(cell).model_dump(mode="json") | {"warmup_steps": CHECK_WARM_UP_STEPS}
        length: dict[str, Any] = {"window_s": 0.0, "min_steps": LOSS_STEPS, "losses": True, "config": config}
        outcome = windows.run(windows.trial(cell, 0, [label], short=True, **length), label, anew=False)
        if not isinstance(outcome, Measured):
            return False, f"not checked: with {precision} the run {describe(outcome)}"
        every.append(FeedFigures.of(outcome).losses)
        if len(every) == 1 and (nothing := fell_too_little(every[0], names[0])) is not None:
            return False, nothing.told
    verdict = compare_losses(every[0], every[1], names)
    return verdict.equal, verdict.told
