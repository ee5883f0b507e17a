"""Throughput of a profile, in units of its subject per second. Pure.

For the bundled trainer these are non-padding tokens/s. A profile may hold several
rates: of a confirmation, a baseline, a worker sweep, a probe and the scaling curve. The
rate closest to actual training is preferred.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.base.estimates import Estimate
from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.window_statistics import estimate_from_bounds, estimate_windows
from autotune.base.wording import plural
from autotune.evidence.baseline import TUNED, row_of
from autotune.evidence.network import NetworkEvidence, ScalingRow
from autotune.evidence.profile import Profile, fill_share
from autotune.evidence.workers import WorkersEvidence

ReadFrom = Literal["confirmed", "training", "windows", "steps", "scaling", "run"]
"""Origin of a rate: windows as training will run (confirm), training on the dataset
(baseline), timed windows (worker sweep), single steps (probe), the scaling curve
(network tuning), or a run's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Training throughput, with its interval and source."""

    estimate: Estimate
    """Rate with its variance, which comparisons need."""
    interval: Interval
    """Rate with its bounds, at the confidence that its origin has."""
    known: Literal["measured", "predicted"] = "measured"
    """``predicted`` at a point of the scaling curve that was not measured, and if a
    rate follows from two measured ones."""
    ranks: int
    """Ranks that reach this rate together."""
    read_from: ReadFrom
    source: str
    """Origin in words, as reports show it."""

    @property
    def value(self) -> float:
        """Throughput in units per second."""
        return self.estimate.value


def training_rates(profile: Profile) -> tuple[Rate, ...]:
    """Return the measured rates of the tuned settings.

    The rate closest to actual training comes first.
    """
    rates = (
        _rate_of_confirmation(profile),
        _rate_of_baseline(profile),
        _rate_of_workers(profile),
        _rate_with_loader(profile),
        _rate_of_probe(profile),
    )
    return tuple(rate for rate in rates if rate is not None)


def tuned_rate(profile: Profile) -> Rate | None:
    """Return the measured rate that is closest to actual training.

    Returns:
        None if no rate was measured.
    """
    rates = training_rates(profile)
    return rates[0] if rates else None


def expected_rate(profile: Profile, ranks: int) -> Rate | None:
    """Return the rate to expect of a number of ranks.

    It is the measured rate if that has as many ranks, else the one on the scaling
    curve.

    Returns:
        None if neither has a rate of as many ranks.
    """
    tuned = tuned_rate(profile)
    if tuned is not None and tuned.ranks == ranks:
        return tuned
    network = profile.evidence.network
    if network is None:
        return None
    return _rate_of_scaling(network, ranks)


def _rate_of_scaling(network: NetworkEvidence, ranks: int) -> Rate | None:
    """Return the rate of a number of ranks on the scaling curve, measured if possible.

    Returns:
        None if the curve has no point with as many ranks.
    """
    rows = [
        row for row in network.scaling if row.nodes * network.ranks_per_node == ranks
    ]
    if not rows:
        return None
    measured_rows = [row for row in rows if row.measured]
    row = measured_rows[0] if measured_rows else rows[0]
    interval = _scaling_interval(row, rows)
    return Rate(
        estimate=estimate_from_bounds(interval),
        interval=interval,
        known="measured" if row.measured else "predicted",
        ranks=ranks,
        read_from="scaling",
        source=f"the scaling curve, {plural(row.nodes, 'node')}",
    )


def _scaling_interval(row: ScalingRow, rows: Sequence[ScalingRow]) -> Interval:
    """Return the rate at a point, as uncertain as its prediction from the links.

    A measured point has no bounds. It takes those of the predicted point with as many
    ranks, relative to the rate.

    Args:
        row: Point of the scaling curve.
        rows: All points with as many ranks.
    """
    predicted = row
    for other in rows:
        if not other.measured and other.efficiency_low is not None:
            predicted = other
            break
    if predicted.efficiency_low is None or predicted.efficiency_high is None:
        return Interval(value=row.tokens_per_s)
    return Interval.from_bounds(
        row.tokens_per_s,
        row.tokens_per_s * predicted.efficiency_low / predicted.efficiency,
        row.tokens_per_s * predicted.efficiency_high / predicted.efficiency,
        CONFIDENCE,
    )


def unit_of_rate(profile: Profile, rate: Rate) -> str:
    """Return the unit of a tuned rate, such as ``tokens/s``.

    Windows of your own code count what its batches tell, which may be another unit
    than that of the searched size.
    """
    evidence = profile.evidence
    if rate.read_from == "confirmed" and evidence.confirm is not None:
        return evidence.confirm.rate_unit
    if rate.read_from == "training" and evidence.baseline is not None:
        return f"{evidence.baseline.unit}/s"
    return f"{profile.subject.unit}/s"


def _rate_of_confirmation(profile: Profile) -> Rate | None:
    """Return the promised rate, with its bounds for one further process.

    Returns:
        None without a confirmation.
    """
    confirm = profile.evidence.confirm
    if confirm is None:
        return None
    interval = confirm.promised
    return Rate(
        estimate=estimate_from_bounds(interval, len(confirm.rows[0].tokens_per_s)),
        interval=interval,
        ranks=confirm.local_ranks,
        read_from="confirmed",
        source="windows of training, each in a separate process",
    )


def _rate_of_baseline(profile: Profile) -> Rate | None:
    """Return the rate of the tuned settings in a baseline, which trains on the dataset.

    Returns:
        None without a baseline, or if its tuned settings have no valid rate.
    """
    baseline = profile.evidence.baseline
    tuned = row_of(baseline, TUNED)
    if baseline is None or tuned is None:
        return None
    tokens_per_s = positive_figures(tuned.units_per_s)
    if baseline.unit != "tokens" or not tokens_per_s:
        return None
    estimate = estimate_windows(tokens_per_s)
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=baseline.local_ranks,
        read_from="training",
        source="training on the dataset",
    )


def _rate_of_workers(profile: Profile) -> Rate | None:
    """Return the rate with the profile's number of DataLoader workers.

    If this number was not measured, return the rate with the number that the sweep
    chose.

    Returns:
        None without a sweep in the subject's unit, or if neither number has a valid
        rate.
    """
    workers = profile.evidence.workers
    share = _useful_share(profile)
    if workers is None or share is None or workers.unit != profile.subject.unit:
        return None
    rates_by_count = {
        row.num_workers: positive_figures(row.units_per_s) for row in workers.rows
    }
    rates = rates_by_count.get(_count_in_use(profile, workers))
    if not rates:
        return None
    estimate = estimate_windows([share * rate for rate in rates])
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=workers.local_ranks,
        read_from="windows",
        source=_with_share("the worker sweep", profile),
    )


def _rate_with_loader(profile: Profile) -> Rate | None:
    """Return the probe's rate, slowed down as the sweep's batches slow the step down.

    It is for a step that counts batches alone, whose size only your loader knows.

    Returns:
        None if one of both is missing, or the sweep has the subject's unit.
    """
    workers, probed = profile.evidence.workers, _rate_of_probe(profile)
    if workers is None or probed is None or workers.unit == profile.subject.unit:
        return None
    count = _count_in_use(profile, workers)
    row = next((row for row in workers.rows if row.num_workers == count), None)
    if row is None:
        return None
    kept = min(1.0, row.ratio_to_cached)
    interval = probed.interval.scaled(kept)
    return Rate(
        estimate=estimate_from_bounds(interval, len(row.units_per_s)),
        interval=interval,
        known="predicted",
        ranks=probed.ranks,
        read_from="windows",
        source=(
            f"the probe's rate, times the {kept:.1%} that num_workers={count} reaches"
            " of cached batches"
        ),
    )


def _count_in_use(profile: Profile, workers: WorkersEvidence) -> int:
    """Return the profile's number of workers if it was measured, else the chosen."""
    count = profile.num_workers
    measured = [row.num_workers for row in workers.rows if row.units_per_s]
    return workers.chosen if count is None or count not in measured else count


def _rate_of_probe(profile: Profile) -> Rate | None:
    """Return the rate of the probe's steps at the profile's micro-batch size.

    Returns:
        None without a probe, or if it did not measure this size.
    """
    probe, size = profile.evidence.probe, profile.size
    share = _useful_share(profile)
    if probe is None or share is None or not isinstance(size, int):
        return None
    point = probe.expected_throughput(size)
    if point is None:
        return None
    interval = point.rate.scaled(share)
    return Rate(
        estimate=estimate_from_bounds(interval, point.timed_steps),
        interval=interval,
        ranks=probe.local_ranks,
        read_from="steps",
        source=_with_share("steps on full sequences", profile),
    )


def _useful_share(profile: Profile) -> float | None:
    """Return the share of counted units that are no padding; None if unknown.

    Your own code counts its units itself.
    """
    return fill_share(profile) if profile.has_train else 1.0


def _with_share(source: str, profile: Profile) -> str:
    """Return the source of a rate, in the words of the subject."""
    if profile.has_train:
        return f"{source}, times the share of non-padding tokens"
    return source.replace("full sequences", "cached batches, without the loader")


def positive_figures(figures: Iterable[float]) -> list[float]:
    """Return the figures that are positive and finite.

    A foreign profile may hold any numbers.
    """
    return [figure for figure in figures if 0 < figure < math.inf]
