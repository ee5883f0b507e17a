"""The bottleneck that a report names, and the quality of its measurements. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.advice.values import Bottleneck
from autotune.base.defaults import WINDOW_S
from autotune.base.interval import Interval
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import MIN_WINDOWS
from autotune.base.wording import plural
from autotune.baseline.values import RecipeName, RecipeRow, row_of
from autotune.confirm.decide import confirmed_words
from autotune.machine.decide import is_busy
from autotune.memory.decide.throughput_dip import dip_words
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.decide.rates import tuned_rate
from autotune.report.values import ReportedProfile, ReportedRun
from autotune.trials.outcomes import Contaminated
from autotune.trials.values import FinishedTrial

BASELINES: dict[RecipeName, str] = {
    "hf-trainer": "defaults",
    "paper": "the paper baseline",
}
FEW_WINDOWS, SHORT_WINDOW_S = 5, 1.0
"""Fewest windows of a recipe, and shortest window, that leave no doubt."""
WIDE_SHARE, VERY_WIDE_SHARE = 0.05, 0.15
"""Half-widths of an interval, as shares of its value, from which measurements are
doubtful, and from which poor."""
ENOUGH_STEPS = 30
"""Fewest steps of a run that show a bottleneck better than the windows of a tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Quality of a tuning's measurements."""

    grade: Literal["high", "medium", "low"]
    reasons: tuple[str, ...]
    command: str | None
    """Command that measures again; None if nothing has to be."""


def main_bottleneck(
    one: ReportedProfile, runs: Sequence[ReportedRun]
) -> Bottleneck | None:
    """Return a profile's bottleneck.

    It is that of the longest run with its settings and ranks, or else of the tuning's
    windows.
    """
    own = [run for run in runs if run.profile_path == one.path and not run.otherwise]
    alike = [run for run in own if run.run.header.world_size == one.profile.local_ranks]
    of_runs = [
        found
        for run in alike
        for found in run.bottlenecks
        if found.steps >= ENOUGH_STEPS
    ]
    return max(
        of_runs,
        key=lambda found: found.steps,
        default=next(iter(one.bottlenecks), None),
    )


def quality_of(one: ReportedProfile) -> Quality:
    """Grade a tuning.

    It is ``low`` for one serious doubt or three others, ``medium`` for fewer, else
    ``high``.
    """
    doubts, evidence = list(_doubts(one)), one.profile.evidence
    low = len(doubts) > 2 or any(serious for serious, _, _ in doubts)
    grade: Literal["high", "medium", "low"] = (
        "low" if low else "medium" if doubts else "high"
    )
    # The first one, on which others rest.
    stage = next((stage for _, _, stage in doubts if stage), None)
    command = probe_command(one.profile, one.path) if stage == "probe" else None
    if stage in ("workers", "baseline"):
        window_s = max(
            [
                WINDOW_S,
                *(
                    2 * found.window_s
                    for found in (evidence.workers, evidence.baseline)
                    if found
                ),
            ]
        )
        command = (
            f"autotune {stage} {one.quoted} --window {window_s:g}s --time-limit 10min"
        )
    return Quality(
        grade=grade, reasons=tuple(reason for _, reason, _ in doubts), command=command
    )


def _doubts(one: ReportedProfile) -> Iterator[tuple[bool, str, str | None]]:
    """Yield each doubt: whether it is serious, its reason, and the phase to repeat.

    The phase is None if repeating is no help.
    """
    evidence, rate = one.profile.evidence, tuned_rate(one.profile)
    if evidence.probe is None:
        yield True, "the micro-batch was not probed", "probe"
        return
    if evidence.workers is None:
        yield False, "DataLoader workers were not measured", "workers"
    elif evidence.workers.undecided_between:
        yield (
            False,
            (
                f"{' or '.join(map(str, evidence.workers.undecided_between))} workers:"
                " undecided"
            ),
            "workers",
        )
    tuned = row_of(evidence.baseline, "tuned")
    if evidence.baseline is None or tuned is None:
        yield False, "not compared with defaults", "baseline"
    else:
        if (windows := len(tuned.tokens_per_s)) < FEW_WINDOWS:
            yield (
                windows < MIN_WINDOWS,
                f"only {plural(windows, 'window')} per recipe",
                "baseline",
            )
        if evidence.baseline.window_s < SHORT_WINDOW_S:
            yield (
                False,
                f"windows of only {format_seconds(evidence.baseline.window_s)}",
                "baseline",
            )
    yield from _wide_intervals(
        evidence.baseline.rows if evidence.baseline else (),
        rate.interval if rate else None,
    )
    yield from _busy_hosts(one.trials)
    if disturbed := sum(isinstance(done.outcome, Contaminated) for done in one.trials):
        yield (
            False,
            f"{plural(disturbed, 'trial')} disturbed by other load or throttling",
            "baseline",
        )
    dip = evidence.probe.dip
    if dip is not None and not dip.kernels:
        yield False, dip_words(dip), None
    confirm = evidence.confirm
    if confirm is not None and confirm.is_kept is False:
        yield False, f"outside the promised interval: {confirmed_words(confirm)}", None


def _busy_hosts(trials: Sequence[FinishedTrial]) -> Iterator[tuple[bool, str, str]]:
    """Yield a doubt if trials ran beside other programs: the highest load."""
    sites = [
        trial.made_on
        for trial in trials
        if trial.made_on is not None and trial.made_on.load_average_1min is not None
    ]
    busiest = max(sites, key=lambda site: site.load_average_1min or 0.0, default=None)
    if busiest is None or busiest.load_average_1min is None:
        return
    load, cpus = busiest.load_average_1min, busiest.allotted_cpus
    if is_busy(load, cpus):
        yield (
            False,
            f"the machine was busy when a command began: load average {load:.2f} with"
            f" {cpus} CPU cores",
            "baseline",
        )


def _wide_intervals(
    rows: Sequence[RecipeRow], rate: Interval | None
) -> Iterator[tuple[bool, str, str]]:
    known = {
        f"speedup over {BASELINES[row.name]}": row.bounded_speedup
        for row in rows
        if row.name in BASELINES
    }
    for name, interval in {"throughput": rate, **known}.items():
        if (
            interval is not None
            and interval.low is not None
            and interval.high is not None
        ):
            half = (interval.high - interval.low) / 2 / interval.value
            if name in known and interval.low <= 1 <= interval.high:
                yield (
                    True,
                    f"the {name} may be none: its interval includes 1",
                    "baseline",
                )
            elif half > WIDE_SHARE:
                yield (
                    half > VERY_WIDE_SHARE,
                    f"{name} known only within ±{format_share(half)}",
                    "baseline",
                )
