"""Which finalist of a search is the fastest, whether it beats the unexplored settings, and learns the same."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.exploration import EXACT_KNOBS, KNOBS, Configuration, ExploredRow, ExploreEvidence
from autotune.core.interval import Interval
from autotune.core.outcome import Measured, describe
from autotune.core.trial import FeedFigures
from autotune.decide.equal_loss import CHECK_WARM_UP_STEPS, LOSS_STEPS, compare_losses, fell_too_little
from autotune.decide.statistics import ratio_of
from autotune.search.exploration import Exploration
from autotune.search.exploration_known import Readings

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


def prove(search: Exploration) -> Proof:
    """Hold the finalists of a search against the unexplored settings and each other, and the fastest in what it learns.

    Where that is refused for how it rounds, those that round as the unexplored settings do have their turn.

    Raises:
        Undecided: If the unexplored settings could not be measured.
    """
    known = search.known
    first = prove_one_of(known.finalists({cell.precision for cell in known.cells}), search)
    if first.refused is None:
        return first
    second = prove_one_of(known.finalists({known.unexplored.precision}), search)
    return replace(second, equal_loss=first.equal_loss, passed_over=first.candidate) if second.adopted else first


def prove_one_of(finalists: Sequence[Configuration], search: Exploration) -> Proof:
    """Find the fastest of some settings; prove it, and where it rounds differently, check what it learns."""
    unexplored = search.unexplored
    if not finalists:
        return Proof(candidate=unexplored, ratio=UNKNOWN, equal_loss=None, adopted=False)
    candidate, ratio = _race(finalists, search)
    faster = ratio.low is not None and ratio.low > 1.0
    exactly = all(getattr(candidate, name) == getattr(unexplored, name) for name in KNOBS if name not in EXACT_KNOBS)
    if not faster or exactly:
        return Proof(candidate=candidate, ratio=ratio, equal_loss=None, adopted=faster)
    equal, told = _check_loss(candidate, search)
    return Proof(candidate=candidate, ratio=ratio, equal_loss=told, adopted=equal, refused=None if equal else told)


def _race(finalists: Sequence[Configuration], search: Exploration) -> tuple[Configuration, Interval]:
    """Windows of all in turn; who is not expected to win any more drops out.

    It ends once one is left and is faster than the unexplored settings, and after as many rounds as are worth it. Which
    one is left is decided by all readings; its ratio is of these rounds alone, as chance in those before has chosen it,
    with bounds that hold for every finalist, as chance in these has a say in which of them is left.
    """
    left = list(finalists)
    pairs: dict[Configuration, list[tuple[float, float]]] = {cell: [] for cell in left}
    for turn in itertools.count(1):
        rates = search.read(left, unexplored_last=True)
        ran = [cell for cell in left if cell in rates and cell in search.known.cells]
        for cell in set(left) & set(rates):
            pairs[cell].append((rates[cell], rates[search.unexplored]))
        if not ran:
            return left[0], UNKNOWN
        left = search.known.may_be_fastest(ran)
        leader = left[0] if left else ran[0]
        ratio = ratio_of(pairs[leader], of=len(finalists))
        proven = len(left) == 1 and ratio.low is not None and ratio.low > 1.0
        late = search.reading.seconds >= search.request.training.request.budget_s
        if not left or turn >= MOST_VERIFYING or (turn >= FIRST_VERIFYING and (late or proven)):
            break
    return leader, ratio


def _check_loss(candidate: Configuration, search: Exploration) -> tuple[bool, str]:
    """Train both ways to round from one start on the same rows, at the unexplored micro-batch."""
    every: list[tuple[float, ...]] = []
    names = f"{search.unexplored.precision}", f"{candidate.precision}"
    for precision in (search.unexplored.precision, candidate.precision):
        label = f"equal loss, {precision}"
        cell = search.unexplored.but(precision=precision)
        config = search.request.config_of(cell).model_dump(mode="json") | {"warmup_steps": CHECK_WARM_UP_STEPS}
        length: dict[str, Any] = {"window_s": 0.0, "min_steps": LOSS_STEPS, "losses": True, "config": config}
        outcome = search.reading.run(search.trial(cell, 0, [label], short=True, **length), label)
        if not isinstance(outcome, Measured):
            return False, f"not checked: with {precision} the run {describe(outcome)}"
        every.append(FeedFigures.of(outcome).losses)
        if len(every) == 1 and (nothing := fell_too_little(every[0], names[0])) is not None:
            return False, nothing.told
    verdict = compare_losses(every[0], every[1], names)
    return verdict.equal, verdict.told


def evidence(search: Exploration, found: Proof) -> ExploreEvidence:
    """Return what the profile keeps of an exploration."""
    before = search.unexplored
    others = [one for cell, one in search.known.tried.items() if cell != before]
    return ExploreEvidence(
        cells=len({*search.known.cells, *search.known.tried}),
        trials=len(others),
        pruned=sum(one.outcome == "pruned" for one in others),
        unexplored=before,
        chosen=found.candidate if found.adopted else before,
        candidate=found.candidate,
        adopted=found.adopted,
        equal_loss=found.equal_loss,
        ratio_to_unexplored=found.ratio.value,
        ratio_low=found.ratio.low,
        ratio_high=found.ratio.high,
        choice=_choice(search, found),
        stopped_because=search.stopped_because,
        left_out=[*search.request.left_out, *search.known.left_out.values()],
        rows=[_row(cell, one, is_unexplored=cell == before) for cell, one in search.known.tried.items()],
        **search.reading.taken,
    )


def _row(cell: Configuration, tried: Readings, *, is_unexplored: bool) -> ExploredRow:
    rates, logs = [rate for rate, _ in tried.best], [log for _, log in tried.best]
    return ExploredRow(
        settings=cell,
        windows=len(tried.full) + len(tried.short),
        real_tokens_per_s=statistics.median(rates) if rates else None,
        ratio_to_unexplored=math.exp(statistics.median(logs)) if logs and not is_unexplored else None,
        outcome=tried.outcome,
    )


def _choice(search: Exploration, found: Proof) -> str:
    unexplored, candidate = search.unexplored, found.candidate.name
    if found.candidate == unexplored:
        return "nothing that was tried is believed to be faster than the unexplored settings"
    if found.adopted:
        more = f"; {found.passed_over.name} is not taken: {found.equal_loss}" if found.passed_over else ""
        return f"{candidate}: proven to be faster than {unexplored.name}{more}"
    if (outcome := search.known.tried[found.candidate].outcome) != "ran":
        return f"{candidate} promised most, and {outcome} when that was to be proven, so {unexplored.name} stays"
    if found.refused is not None:
        return f"{candidate}: faster, and not taken: {found.refused}"
    return f"{candidate} is not proven to be faster, so {unexplored.name} stays"
