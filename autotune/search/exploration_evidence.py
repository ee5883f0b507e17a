"""What the profile keeps of an exploration, and how it trains after one."""

import math
import statistics

from autotune.core.exploration import ExploredRow, ExploreEvidence, KnobSettings
from autotune.core.knobs import Knobs
from autotune.search.exploration import Exploration
from autotune.search.exploration_known import Tried
from autotune.search.exploration_proof import Explored


def evidence(search: Exploration, found: Explored) -> ExploreEvidence:
    """What the profile keeps."""
    unexplored = search.unexplored
    chosen = found.candidate if found.adopted else unexplored
    others = [(cell, one) for cell, one in search.tried.items() if cell != unexplored]
    return ExploreEvidence(
        cells=len({*search.cells, *search.tried}),
        trials=len(others),
        windows=search.windows,
        pruned=sum(one.outcome == "pruned" for _, one in others),
        unexplored=_settings(unexplored),
        chosen=_settings(chosen),
        candidate=_settings(found.candidate),
        ratio_to_unexplored=found.ratio.value,
        ratio_low=found.ratio.low,
        ratio_high=found.ratio.high,
        adopted=found.adopted,
        choice=_choice(search, found),
        stopped_because=search.stopped_because,
        equal_loss=found.equal_loss,
        left_out=[*search.request.left_out, *search.known.left_out.values()],
        rows=[_row(cell, one) for cell, one in search.tried.items()],
        seconds=round(search.seconds, 3),
    )


def _settings(cell: Knobs) -> KnobSettings:
    return KnobSettings(**cell.settings())


def _row(cell: Knobs, tried: Tried) -> ExploredRow:
    logs = tried.ratios or tried.short
    return ExploredRow(
        settings=_settings(cell),
        windows=tried.windows,
        real_tokens_per_s=statistics.median(tried.rates) if tried.rates else None,
        ratio_to_unexplored=math.exp(statistics.median(logs)) if logs else None,
        outcome=tried.outcome,
    )


def _choice(search: Exploration, found: Explored) -> str:
    unexplored, candidate = search.unexplored, found.candidate.name
    if found.candidate == unexplored:
        return "nothing that was tried is believed to be faster than the unexplored settings"
    if found.adopted:
        more = f"; {found.passed_over.name} is not taken: {found.equal_loss}" if found.passed_over else ""
        return f"{candidate}: proven to be faster than {unexplored.name}{more}"
    if (outcome := search.tried[found.candidate].outcome) != "ran":
        return f"{candidate} promised most, and {outcome} when that was to be proven, so {unexplored.name} stays"
    if found.refused is not None:
        return f"{candidate}: faster, and not taken: {found.refused}"
    return f"{candidate} is not proven to be faster, so {unexplored.name} stays"
