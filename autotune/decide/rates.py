"""Real tokens/s of a profile, with their interval and where they come from, and of a run. Pure.

What a report expects of a run and what a comparison holds against each other are these same figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.evidence import ScalingRow
from autotune.core.interval import CONFIDENCE, Interval
from autotune.core.profile import Profile
from autotune.decide.cost import row_of
from autotune.decide.statistics import Estimate, of_bounds, of_sound_steps, of_windows
from trainer.record import Run, StepRow

WARM_UP_SHARE, MOST_WARM_UP_ROWS = 0.1, 20
"""Of a run's logged steps: caches, clocks and allocators settle in them."""

ReadFrom = Literal["training", "windows", "steps", "scaling", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast something trains, in real tokens/s."""

    estimate: Estimate
    interval: Interval
    known: Literal["measured", "predicted"] = "measured"
    ranks: int
    read_from: ReadFrom
    source: str

    @property
    def value(self) -> float:
        """Real tokens/s."""
        return self.estimate.value


def fill_share(profile: Profile) -> float | None:
    """Real tokens of a row over its places, in the mean of the dataset; None where it was not probed."""
    probe = profile.evidence.probe
    return None if probe is None else probe.mean_real_tokens_per_row / profile.train.seq_length_tokens


def training_rates(profile: Profile) -> tuple[Rate, ...]:
    """Of the tuned settings on this machine, what comes closest to training first.

    Windows of training on the dataset come before windows of the worker sweep, and these before steps on full rows.
    """
    found = (_by_training(profile), _by_windows(profile), _by_steps(profile))
    return tuple(rate for rate in found if rate is not None)


def tuned_rate(profile: Profile) -> Rate | None:
    """The first of them; None where nothing was measured."""
    return next(iter(training_rates(profile)), None)


def expected_rate(profile: Profile, ranks: int) -> Rate | None:
    """What so many ranks should reach: as measured with as many, else by the scaling curve; None where neither says."""
    tuned = tuned_rate(profile)
    if tuned is not None and tuned.ranks == ranks:
        return tuned
    network = profile.evidence.network
    if network is None:
        return None
    rows = [row for row in network.scaling if row.nodes * network.ranks_per_node == ranks]
    row = next((row for row in rows if row.measured), rows[0] if rows else None)
    if row is None:
        return None
    predicted = next((one for one in rows if not one.measured and one.efficiency_low is not None), row)
    return _scaled(row, predicted, ranks)


def settled_steps(run: Run) -> tuple[StepRow, ...]:
    """Logged steps of its last start, as earlier ones may have had other settings; without the first ones."""
    rows = tuple(row for row in run.steps if row.step > run.header.resumed_step)
    return rows[min(MOST_WARM_UP_ROWS, max(1, math.ceil(WARM_UP_SHARE * len(rows)))) :]


def run_rate(run: Run) -> Rate | None:
    """Of a run's settled steps, of all of them where it is too short for that; None where they hold no figures."""
    rows = settled_steps(run) or run.steps
    found = of_sound_steps([(row.real_tokens_per_s * row.step_s, row.step_s) for row in rows])
    if found is None:
        return None
    return _rate(found, run.header.world_size, "run", f"{len(rows)} logged steps")


def _by_training(profile: Profile) -> Rate | None:
    baseline = profile.evidence.baseline
    tuned = row_of(baseline, "tuned")
    windows = [] if tuned is None else _positive(tuned.real_tokens_per_s)
    if baseline is None or not windows:
        return None
    return _rate(of_windows(windows), baseline.local_ranks, "training", "training on the dataset")


def _by_windows(profile: Profile) -> Rate | None:
    """Of the profile's own number of loader workers; where it was not measured, of the one that was chosen."""
    found, fill = profile.evidence.workers, fill_share(profile)
    if found is None or fill is None:
        return None
    by_count = {row.loader_workers: _positive(row.slot_tokens_per_s) for row in found.rows}
    windows = by_count.get(profile.train.data.loader_workers) or by_count.get(found.chosen)
    if not windows:
        return None
    source = "the worker sweep, slots times the share that holds tokens"
    return _rate(of_windows([fill * rate for rate in windows]), found.local_ranks, "windows", source)


def _by_steps(profile: Profile) -> Rate | None:
    probe, fill = profile.evidence.probe, fill_share(profile)
    rows = profile.train.micro_batch_rows
    point = probe.promised(rows) if probe is not None else None
    if probe is None or fill is None or point is None:
        return None
    interval = point.slot_rate.scaled(fill)
    source = "steps on full rows, times the share of rows that holds tokens"
    return _rate(of_bounds(interval, point.timed_steps), probe.local_ranks, "steps", source, interval)


def _scaled(row: ScalingRow, predicted: ScalingRow, ranks: int) -> Rate:
    """A point of the curve, as uncertain as the prediction of it is by the links."""
    low, high = (
        None if end is None else row.real_tokens_per_s * end / predicted.efficiency
        for end in (predicted.efficiency_low, predicted.efficiency_high)
    )
    interval = Interval.of(row.real_tokens_per_s, low, high, CONFIDENCE)
    rate = _rate(of_bounds(interval), ranks, "scaling", f"the scaling curve, {row.nodes} nodes", interval)
    return replace(rate, known="measured" if row.measured else "predicted")


def _rate(estimate: Estimate, ranks: int, read_from: ReadFrom, source: str, interval: Interval | None = None) -> Rate:
    known = estimate.interval() if interval is None else interval
    return Rate(estimate=estimate, interval=known, ranks=ranks, read_from=read_from, source=source)


def _positive(figures: Sequence[float]) -> list[float]:
    """Files of others may hold any."""
    return [figure for figure in figures if 0 < figure < math.inf]
