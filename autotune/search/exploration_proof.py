"""Which finalist of a search is the fastest, whether it beats the unexplored settings, and learns the same."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.exploration import EXACT_KNOBS, KNOBS, Configuration
from autotune.core.interval import Interval
from autotune.core.outcome import Measured, describe
from autotune.core.trial import FeedFigures
from autotune.decide.equal_loss import CHECK_WARM_UP_STEPS, LOSS_STEPS, compare_losses, fell_too_little
from autotune.decide.statistics import ratio_of
from autotune.search.exploration_known import Cells, Windows

FIRST_VERIFYING, MOST_VERIFYING = 4, 12
UNKNOWN = Interval(value=1.0, low=None, high=None)
"""Of what did not run, or was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a search came to."""

    candidate: Configuration
    """What promised most; the unexplored settings where nothing did."""
    ratio: Interval
    """Of the candidate to the unexplored settings, with bounds that are 98 % sure for all finalists together."""
    equal_loss: str | None
    adopted: bool
    refused: str | None = None
    """Why it is not taken although it is faster."""
    passed_over: Configuration | None = None
    """Settings that are faster, and were not taken for what ``equal_loss`` says of them."""


def prove(known: Cells, windows: Windows) -> Proof:
    """Hold the finalists of a search against the unexplored settings and each other, and the fastest in what it learns.

    Where that is refused for how it rounds, those that round as the unexplored settings do have their turn.
    """
    first = prove_one_of(known.finalists({cell.precision for cell in known.cells}), known, windows)
    if first.refused is None:
        return first
    second = prove_one_of(known.finalists({known.unexplored.precision}), known, windows)
    return replace(second, equal_loss=first.equal_loss, passed_over=first.candidate) if second.adopted else first


def prove_one_of(finalists: Sequence[Configuration], known: Cells, windows: Windows) -> Proof:
    """Find the fastest of some settings; prove it, and where it rounds differently, check what it learns."""
    if not finalists:
        return Proof(candidate=known.unexplored, ratio=UNKNOWN, equal_loss=None, adopted=False)
    candidate, ratio = _race(finalists, known, windows)
    faster = ratio.low is not None and ratio.low > 1.0
    if not faster or not _rounds_differently(candidate, known.unexplored):
        return Proof(candidate=candidate, ratio=ratio, equal_loss=None, adopted=faster)
    equal, told = _check_loss(candidate, windows)
    return Proof(candidate=candidate, ratio=ratio, equal_loss=told, adopted=equal, refused=None if equal else told)


def _race(finalists: Sequence[Configuration], known: Cells, windows: Windows) -> tuple[Configuration, Interval]:
    """Windows of all in turn; who is not expected to win any more drops out.

    It ends once one is left and is faster than the unexplored settings, and after as many rounds as are worth it. Which
    one is left is decided by all readings; its ratio is of these rounds alone, as chance in those before has chosen it,
    with bounds that hold for every finalist, as chance in these has a say in which of them is left.
    """
    left = list(finalists)
    pairs: dict[Configuration, list[tuple[float, float]]] = {cell: [] for cell in left}
    for turn in itertools.count(1):
        ran = _round(left, known, windows, pairs)
        if not ran:
            return left[0], UNKNOWN
        left = known.may_be_fastest(ran)
        leader = left[0] if left else ran[0]
        ratio = ratio_of(pairs[leader], of=len(finalists))
        proven = len(left) == 1 and ratio.low is not None and ratio.low > 1.0
        late = windows.reading.seconds >= windows.request.training.request.budget_s
        if not left or turn >= MOST_VERIFYING or (turn >= FIRST_VERIFYING and (late or proven)):
            break
    return leader, ratio


def _round(
    cells: Sequence[Configuration],
    known: Cells,
    windows: Windows,
    pairs: Mapping[Configuration, list[tuple[float, float]]],
) -> list[Configuration]:
    """A window of each; those that ran, with what they and the unexplored settings gave."""
    outcomes = windows.read([*cells, known.unexplored], short=False)
    rates = windows.rates(outcomes)
    known.note(rates, short=False)
    for cell in cells:
        if cell in rates:
            pairs[cell].append((rates[cell], rates[known.unexplored]))
        else:
            known.failed(cell, outcomes[cell])
    return [cell for cell in cells if cell in rates and cell in known.cells]


def _rounds_differently(candidate: Configuration, unexplored: Configuration) -> bool:
    return any(getattr(candidate, name) != getattr(unexplored, name) for name in KNOBS if name not in EXACT_KNOBS)


def _check_loss(candidate: Configuration, windows: Windows) -> tuple[bool, str]:
    """Train both ways to round from one start on the same rows, at the unexplored micro-batch."""
    unexplored = windows.request.unexplored
    every: list[tuple[float, ...]] = []
    names = f"{unexplored.precision}", f"{candidate.precision}"
    for precision in (unexplored.precision, candidate.precision):
        label = f"equal loss, {precision}"
        cell = unexplored.but(precision=precision)
        config = windows.request.config_of(cell).model_dump(mode="json") | {"warmup_steps": CHECK_WARM_UP_STEPS}
        length: dict[str, Any] = {"window_s": 0.0, "min_steps": LOSS_STEPS, "losses": True, "config": config}
        outcome = windows.reading.run(windows.trial(cell, 0, [label], short=True, **length), label)
        if not isinstance(outcome, Measured):
            return False, f"not checked: with {precision} the run {describe(outcome)}"
        every.append(FeedFigures.of(outcome).losses)
        if len(every) == 1 and (nothing := fell_too_little(every[0], names[0])) is not None:
            return False, nothing.told
    verdict = compare_losses(every[0], every[1], names)
    return verdict.equal, verdict.told
