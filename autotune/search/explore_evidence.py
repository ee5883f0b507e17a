"""Evidence of a joint search, for the profile."""

import math
import statistics

from autotune.evidence.explore import (
    ExploredConfiguration,
    ExploredRow,
    ExploreEvidence,
)
from autotune.search.configuration import Configuration
from autotune.search.decide.search_state import ConfigurationWindows
from autotune.search.measure import Exploration
from autotune.search.verification import ConfirmedChoice


def explore_evidence(search: Exploration, choice: ConfirmedChoice) -> ExploreEvidence:
    """Return the profile's evidence of a search."""
    state, request = search.state, search.request
    other_results = [
        result
        for configuration, result in state.tried.items()
        if configuration != search.starting
    ]
    chosen = choice.candidate if choice.adopted else search.starting
    return ExploreEvidence(
        configurations=len({*state.remaining, *state.tried}),
        trials=len(other_results),
        pruned=sum(result.outcome == "pruned" for result in other_results),
        starting=_explored(search, search.starting),
        chosen=_explored(search, chosen),
        candidate=_explored(search, choice.candidate),
        adopted=choice.adopted,
        equal_loss=choice.equal_loss,
        ratio_to_starting=choice.ratio.value,
        ratio_low=choice.ratio.low,
        ratio_high=choice.ratio.high,
        choice=_reason(search, choice),
        stopped_because=search.stopped_because,
        left_out=[*request.settings.left_out, *state.excluded_values.values()],
        rows=[
            _row(search, configuration, result)
            for configuration, result in state.tried.items()
        ],
        **search.timer.totals,
    )


def _explored(
    search: Exploration, configuration: Configuration
) -> ExploredConfiguration:
    return ExploredConfiguration(
        name=search.request.words(configuration), settings=dict(configuration)
    )


def _row(
    search: Exploration, configuration: Configuration, result: ConfigurationWindows
) -> ExploredRow:
    """Return the result of a configuration that was tried."""
    ratio = predicted_ratio = None
    if configuration != search.starting:
        predicted_ratio = search.state.predicted_ratio(configuration)
        if result.best:
            ratio = math.exp(
                statistics.median(window.log_ratio for window in result.best)
            )
    rate = None
    if result.best:
        rate = statistics.median(window.units_per_s for window in result.best)
    return ExploredRow(
        name=search.request.words(configuration),
        settings=dict(configuration),
        windows=len(result.full) + len(result.short),
        outcome=result.outcome,
        tokens_per_s=rate,
        ratio_to_starting=ratio,
        predicted_ratio=predicted_ratio,
    )


def _reason(search: Exploration, choice: ConfirmedChoice) -> str:
    """Return the reason for the chosen settings."""
    starting = search.request.words(search.starting)
    candidate = search.request.words(choice.candidate)
    if choice.candidate == search.starting:
        return (
            f"{starting} (starting configuration): no configuration is expected to be"
            " faster"
        )
    if choice.adopted:
        reason = f"{candidate}: verified to be faster than {starting}"
        if choice.passed_over is not None:
            passed_over = search.request.words(choice.passed_over)
            reason += f"; {passed_over} was rejected: {choice.equal_loss}"
        return reason
    outcome = search.state.tried[choice.candidate].outcome
    if outcome != "ran":
        why = f"the verification of {candidate} failed ({outcome})"
    elif choice.rejected is not None:
        why = f"{candidate} is faster, but was rejected: {choice.rejected}"
    else:
        why = f"{candidate} was not verified to be faster"
    return f"{starting} (starting configuration): {why}"
