"""Verification of the most promising configurations of a search.

They are measured in interleaved rounds with the starting configuration. If the fastest
one rounds differently, its loss is compared too.
"""

import bisect
import itertools
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import fewest_changes, with_size
from autotune.search.measure import Exploration, MeasuredWindow
from autotune.trials.decide.equal_loss import LossVerdict, check_loss
from autotune.trials.outcomes import Crashed, Measured, Outcome

FINALISTS = 6
"""Largest number of configurations that are verified against the starting
configuration."""
FEWEST_ROUNDS, MOST_ROUNDS = 4, 12
"""Limits of the rounds of a verification."""
UNKNOWN = Interval(value=1.0, low=None, high=None)
"""Ratio of a configuration that did not run or was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedChoice:
    """Result of a search."""

    candidate: Configuration
    """Most promising configuration; the starting configuration if nothing is better."""
    ratio: Interval
    """Ratio of the candidate to the starting configuration, with 98 % bounds that hold
    for all finalists together."""
    equal_loss: str | None
    """Result of the loss check; None if there was nothing to check."""
    adopted: bool
    """True if the candidate is verified to be faster, with equal loss."""
    rejected: str | None = None
    """Reason for which a faster candidate is not adopted."""
    passed_over: Configuration | None = None
    """Faster configuration that was rejected for the reason in ``equal_loss``."""


def confirm(search: Exploration) -> ConfirmedChoice:
    """Return the fastest finalist.

    If the loss check rejects it, it is the fastest one with another arithmetic.
    """
    first = choice = confirm_one_of(finalists(search), search)
    rejected: list[str] = []
    while choice.rejected is not None and (not rejected or search.left_s > 0):
        rejected.append(search.request.settings.arithmetic(choice.candidate))
        choice = confirm_one_of(finalists(search, rejected), search)
    if choice is first or not choice.adopted:
        return first
    return replace(choice, equal_loss=first.equal_loss, passed_over=first.candidate)


def finalists(
    search: Exploration, rejected_arithmetic: Collection[str] = ()
) -> list[Configuration]:
    """Return the most promising configurations that ran.

    There are as many as there is time to verify.

    Args:
        search: Search that has ended.
        rejected_arithmetic: Arithmetics that the loss check rejected.
    """
    promising = search.state.finalists(tuple(rejected_arithmetic))[:FINALISTS]
    starting_s = search.expected_s(search.starting)
    seconds = [search.expected_s(configuration) for configuration in promising]
    rounds_s = [
        FEWEST_ROUNDS * (starting_s + configurations_s)
        for configurations_s in itertools.accumulate(seconds)
    ]
    return promising[: max(1, bisect.bisect(rounds_s, search.left_s))]


def confirm_one_of(
    candidates: Sequence[Configuration], search: Exploration
) -> ConfirmedChoice:
    """Find the fastest configuration, and verify that it is faster.

    If it rounds differently, its loss is checked.
    """
    if not candidates:
        return ConfirmedChoice(
            candidate=search.starting, ratio=UNKNOWN, equal_loss=None, adopted=False
        )
    candidate, ratio = _race(candidates, search)
    is_faster = _is_faster(ratio)
    choice = ConfirmedChoice(
        candidate=candidate, ratio=ratio, equal_loss=None, adopted=is_faster
    )
    arithmetic = search.request.settings.arithmetic
    if not is_faster or arithmetic(candidate) == arithmetic(search.starting):
        return choice
    verdict = _check_loss(candidate, search)
    return replace(
        choice,
        equal_loss=verdict.message,
        adopted=verdict.equal,
        rejected=None if verdict.equal else verdict.message,
    )


def _race(
    candidates: Sequence[Configuration], search: Exploration
) -> tuple[Configuration, Interval]:
    """Measure interleaved windows of all candidates.

    Each that is no longer expected to be the fastest is dropped. The race ends when the
    last one is verified to be faster, when none remains, or when time or rounds run
    out.

    All windows decide which one remains. Its ratio uses these rounds alone, because
    chance in earlier ones selected it, and its bounds hold for every candidate, because
    chance in these rounds affects which one remains.
    """
    starting = search.starting
    rounds: list[dict[Configuration, MeasuredWindow]] = []
    remaining = list(candidates)
    leader, ratio = remaining[0], UNKNOWN
    try:
        while True:
            rounds.append(search.measure(remaining, starting_last=True))
            running = [
                configuration
                for configuration in remaining
                if configuration in search.state.remaining
            ]
            if not running:
                return remaining[0], UNKNOWN
            remaining = search.state.may_be_fastest(running)
            leader = remaining[0] if remaining else running[0]
            pairs = [
                (windows[leader].rated.units_per_s, windows[starting].rated.units_per_s)
                for windows in rounds
                if leader in windows
            ]
            ratio = paired_ratio(pairs, candidates=len(candidates))
            is_decided = not remaining or len(rounds) >= MOST_ROUNDS
            if len(rounds) >= FEWEST_ROUNDS:
                is_verified = len(remaining) == 1 and _is_faster(ratio)
                is_decided = is_decided or is_verified or search.left_s <= 0
            if is_decided:
                return leader, ratio
    finally:
        _tell_race([starting, *candidates], rounds, search)


def _is_faster(ratio: Interval) -> bool:
    return ratio.low is not None and ratio.low > 1.0


def _tell_race(
    configurations: Sequence[Configuration],
    rounds: Sequence[dict[Configuration, MeasuredWindow]],
    search: Exploration,
) -> None:
    """Add a trial for each configuration of a race to the study."""
    for configuration in configurations:
        windows = [
            windows_of_round[configuration]
            for windows_of_round in rounds
            if configuration in windows_of_round
        ]
        trial = search.study.ask(search.values, configuration)
        attributes = search.attributes(configuration, full=windows)
        attributes["phase"] = "verification"
        if not windows:
            search.study.tell(trial, state="failed", attributes=attributes)
            continue
        rates = [window.rated.units_per_s for window in windows]
        search.study.tell(trial, statistics.median(rates), attributes=attributes)


def _check_loss(candidate: Configuration, search: Exploration) -> LossVerdict:
    """Compare the losses of both ways to compute at the starting size."""
    settings, starting = search.request.settings, search.starting
    names = (settings.arithmetic(starting), settings.arithmetic(candidate))
    rounding = [
        setting.name for setting in settings.settings if setting.changes_rounding
    ]
    candidate_at_starting_size = with_size(
        settings, candidate, int(starting[settings.size.name])
    )
    rounded_as_candidate = fewest_changes(
        settings,
        starting.but({name: candidate[name] for name in rounding}),
        candidate_at_starting_size,
    )
    if settings.arithmetic(rounded_as_candidate) != names[1]:
        # The subject rounds by settings that it does not declare as such.
        rounded_as_candidate = candidate_at_starting_size
    configurations = dict(zip(names, (starting, rounded_as_candidate), strict=True))

    def train(arithmetic: str) -> Outcome:
        label = f"loss check, {arithmetic}"
        trial = search.request.windows.loss_trial(configurations[arithmetic], label)
        outcome = search.timer.measure_window(trial, label)
        if isinstance(outcome, Measured) and not outcome.figures.get("losses"):
            return Crashed(detail="the step does not report the loss of each step")
        return outcome

    return check_loss(names, train)
