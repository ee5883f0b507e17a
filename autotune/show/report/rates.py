"""Real tokens/s of a profile, with their interval and where they come from; and what a run made of them. Pure."""

import statistics
from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.evidence import ScalingRow
from autotune.core.outcome import Measured
from autotune.core.trial import StepFigures
from autotune.decide.bottleneck import rows_of_this_start
from autotune.show.report.cost import row_of
from autotune.show.report.figures import interval_of
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from trainer.record import StepRow

_CHUNKS = 8
"""Steps that follow each other are alike, so their spread is taken over means of so many stretches."""
_ALIKE_SHARE = 0.02
"""Differences below this are nobody's concern."""
_FAR_SHARE = 0.1
"""Differences above this are told, noise or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A figure with 95 % bounds, if it was repeated."""

    value: float
    low: float | None = None
    high: float | None = None
    known: Literal["measured", "predicted"]
    ranks: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One quantity of a run against what was expected of it."""

    quantity: Literal["real tokens/s", "MFU", "peak memory"]
    expected: float | None
    expected_low: float | None = None
    expected_high: float | None = None
    expected_source: str
    achieved: float | None
    achieved_low: float | None = None
    achieved_high: float | None = None
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Achieved over expected."""
        return None if not self.expected or self.achieved is None else self.achieved / self.expected


def tuned_rate(one: ReportedProfile) -> Rate | None:
    """Real tokens/s of the tuned settings on this machine, from what comes closest to training; None where nothing is.

    Windows of training on the dataset come before windows of the worker sweep, and these before steps on full rows.
    """
    evidence, fill = one.profile.evidence, one.fill_share
    tuned = row_of(evidence.baseline, "tuned")
    if evidence.baseline is not None and tuned is not None and tuned.real_tokens_per_s:
        ranks = evidence.baseline.local_ranks
        return _of(tuned.real_tokens_per_s, 1.0, ranks, "training on the dataset")
    if evidence.workers is not None and fill is not None:
        found = evidence.workers
        rows = [row.slot_tokens_per_s for row in found.rows if row.loader_workers == found.chosen]
        if rows and rows[0]:
            return _of(rows[0], fill, found.local_ranks, "the worker sweep, slots times the share that holds tokens")
    if evidence.probe is not None and fill is not None:
        probe = evidence.probe
        point = next((point for point in probe.curve if point.rows == one.profile.train.micro_batch_rows), None)
        if point is not None:
            low, high = point.slot_tokens_per_s_low, point.slot_tokens_per_s_high
            return Rate(
                value=fill * point.slot_tokens_per_s,
                low=None if low is None else fill * low,
                high=None if high is None else fill * high,
                known="measured",
                ranks=probe.local_ranks,
                source="steps on full rows, times the share of rows that holds tokens",
            )
    return None


def expected_rate(one: ReportedProfile, ranks: int) -> Rate | None:
    """What so many ranks should reach: as measured with as many, else by the scaling curve; None where neither says."""
    tuned = tuned_rate(one)
    if tuned is not None and tuned.ranks == ranks:
        return tuned
    network = one.profile.evidence.network
    if network is None:
        return None
    rows = [row for row in network.scaling if row.nodes * network.ranks_per_node == ranks]
    row = next((row for row in rows if row.measured), rows[0] if rows else None)
    if row is None:
        return None
    predicted = next((one for one in rows if not one.measured and one.efficiency_low is not None), row)
    return _scaled(row, predicted, ranks)


def drifts(one: ReportedProfile | None, reported: ReportedRun) -> tuple[Drift, ...]:
    """A run against its profile."""
    steps = later_steps(reported)
    if one is None or not steps:
        return ()
    found = (_speed(one, reported, steps), _mfu(one, reported, steps), _memory(one, reported, steps))
    if not reported.otherwise and one.intact:
        return found
    why = f"trained otherwise ({', '.join(reported.otherwise)})" if reported.otherwise else "the profile was edited"
    return tuple(replace(drift, verdict=f"not comparable: {why}") for drift in found)


def later_steps(reported: ReportedRun) -> tuple[StepRow, ...]:
    """Of the last start, as earlier ones may have had other settings; without its first, which pays for the start."""
    return rows_of_this_start(reported.run) or reported.run.steps


def achieved_rate(steps: tuple[StepRow, ...], ranks: int) -> Rate:
    """Real tokens/s of a run, by the means of stretches of it."""
    size = -(-len(steps) // _CHUNKS)
    chunks = [steps[first : first + size] for first in range(0, len(steps), size)]
    means = [statistics.fmean(step.real_tokens_per_s for step in chunk) for chunk in chunks]
    return _of(means, 1.0, ranks, f"{len(steps)} logged steps")


def _of(figures: list[float], factor: float, ranks: int, source: str) -> Rate:
    found = interval_of(figures)
    if found is None:
        return Rate(value=0.0, known="measured", ranks=ranks, source=source)
    low, high = (None if end is None else factor * end for end in (found.low, found.high))
    return Rate(value=factor * found.value, low=low, high=high, known="measured", ranks=ranks, source=source)


def _scaled(row: ScalingRow, predicted: ScalingRow, ranks: int) -> Rate:
    """A point of the curve, as uncertain as the prediction of it is by the links."""
    low, high = (
        None if end is None else row.real_tokens_per_s * end / predicted.efficiency
        for end in (predicted.efficiency_low, predicted.efficiency_high)
    )
    known: Literal["measured", "predicted"] = "measured" if row.measured else "predicted"
    source = f"the scaling curve, {row.nodes} nodes"
    return Rate(value=row.real_tokens_per_s, low=low, high=high, known=known, ranks=ranks, source=source)


def _speed(one: ReportedProfile, reported: ReportedRun, steps: tuple[StepRow, ...]) -> Drift:
    ranks = reported.run.header.world_size
    achieved, expected = achieved_rate(steps, ranks), expected_rate(one, ranks)
    if expected is None:
        return Drift(
            quantity="real tokens/s", expected=None, expected_source=f"nothing known of {ranks} ranks",
            achieved=achieved.value, achieved_low=achieved.low, achieved_high=achieved.high,
            verdict="nothing to hold it against",
        )  # fmt: skip
    return Drift(
        quantity="real tokens/s", expected=expected.value, expected_low=expected.low, expected_high=expected.high,
        expected_source=f"{expected.known}: {expected.source}", achieved=achieved.value, achieved_low=achieved.low,
        achieved_high=achieved.high, verdict=_verdict(expected, achieved),
    )  # fmt: skip


def _verdict(expected: Rate, achieved: Rate) -> str:
    """Drift is a difference that the noise of both does not explain."""
    ratio = achieved.value / expected.value if expected.value else 1.0
    if abs(ratio - 1) <= _ALIKE_SHARE:
        return "as expected"
    if expected.low is None or expected.high is None or achieved.low is None or achieved.high is None:
        far = f", and {abs(ratio - 1):.0%} {'slower' if ratio < 1 else 'faster'}" if abs(ratio - 1) > _FAR_SHARE else ""
        return f"not repeated, so the noise is not known{far}"
    if achieved.high < expected.low:
        return "drift: slower, beyond noise"
    return "drift: faster, beyond noise" if achieved.low > expected.high else "within noise"


def _mfu(one: ReportedProfile, reported: ReportedRun, steps: tuple[StepRow, ...]) -> Drift:
    """What the expected rate makes of the peak, by the FLOPs of a real token that the run itself counted."""
    known = [
        (step.mfu, step.real_tokens_per_s) for step in steps if step.mfu is not None and step.real_tokens_per_s > 0
    ]
    ranks = reported.run.header.world_size
    expected = expected_rate(one, ranks)
    if not known:
        return Drift(
            quantity="MFU", expected=None, expected_source="the device's peak is not known", achieved=None,
            verdict="the device's peak is not known",
        )  # fmt: skip
    per_rate = statistics.median(mfu / rate for mfu, rate in known)
    achieved = achieved_rate(steps, ranks)
    ends = [None if end is None else per_rate * end for end in (achieved.low, achieved.high)]
    if expected is None:
        return Drift(
            quantity="MFU", expected=None, expected_source=f"nothing known of {ranks} ranks",
            achieved=per_rate * achieved.value, achieved_low=ends[0], achieved_high=ends[1],
            verdict="nothing to hold it against",
        )  # fmt: skip
    return Drift(
        quantity="MFU",
        expected=per_rate * expected.value,
        expected_low=None if expected.low is None else per_rate * expected.low,
        expected_high=None if expected.high is None else per_rate * expected.high,
        expected_source=f"{expected.known}: {expected.source}, times the FLOPs of a real token over the peak",
        achieved=per_rate * achieved.value,
        achieved_low=ends[0],
        achieved_high=ends[1],
        verdict=_verdict(expected, achieved),
    )


def _memory(one: ReportedProfile, reported: ReportedRun, steps: tuple[StepRow, ...]) -> Drift:
    """On a CPU a run counts its whole process, a trial what it adds to the loaded program: told, and not compared."""
    rows = reported.run.header.rows_per_microbatch_per_rank
    alike = [
        StepFigures.of(done.outcome)
        for done in one.trials
        if done.trial.job == "step" and isinstance(done.outcome, Measured) and _is_of(one, done.trial.measured, rows)
    ]
    # A run counts what its allocator holds; what lies outside of it is the device's.
    peaks = [figures.peak_bytes - (figures.outside_allocator_bytes or 0) for figures in alike]
    expected = float(max(peaks)) if peaks else None
    achieved = float(max(step.peak_memory_bytes for step in steps))
    if reported.run.header.device == "cpu":
        verdict = "not comparable on a CPU: the run counts its whole process"
    elif expected is None:
        verdict = "nothing to hold it against"
    elif abs(achieved / expected - 1) <= _ALIKE_SHARE:
        verdict = "as expected"
    else:
        verdict = f"drift: {'more' if achieved > expected else 'less'} than its trial took"
    source = f"measured: trials of {rows} rows" if peaks else f"no trial of these settings had {rows} rows"
    return Drift(quantity="peak memory", expected=expected, expected_source=source, achieved=achieved, verdict=verdict)


_OF_MEMORY = (
    "seq_length_tokens", "layout", "precision", "device", "head", "last_layer", "compile_layers", "checkpointing",
    "attention_dropout",
)  # fmt: skip


def _is_of(one: ReportedProfile, measured: dict[str, object], rows: int) -> bool:
    """Whether a trial took the profile's own step, with so many rows: a ledger has trials of other recipes too."""
    config = measured.get("config")
    if not isinstance(config, dict) or config.get("micro_batch_rows") != rows:
        return False
    train = one.profile.train.model_dump(mode="json")
    return all(config.get(name, train[name]) == train[name] for name in _OF_MEMORY)
