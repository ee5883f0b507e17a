"""The bottleneck that a report names, and the quality of its measurements. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autotune.base.defaults import CONFIRM_WINDOW_S, WINDOW_S
from autotune.base.estimates import TOO_NOISY
from autotune.base.interval import Interval
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import MIN_WINDOWS
from autotune.base.wording import plural
from autotune.confirm.decide import confirmed_words
from autotune.evidence.advice import Bottleneck
from autotune.evidence.baseline import TUNED, BaselineEvidence, row_of
from autotune.evidence.confirm import ConfirmEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import SubjectTable
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.decide import is_busy
from autotune.memory.decide.throughput_dip import dip_words
from autotune.profiles.decide.follow_up import (
    command,
    probe_command,
    workers_command,
)
from autotune.profiles.decide.rates import tuned_rate
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.values import ReportedRun
from autotune.trials.outcomes import Contaminated
from autotune.trials.values import FinishedTrial

FEW_WINDOWS = 5
"""Fewest windows of a row that leave no doubt."""
SHORT_WINDOW_S = 1.0
"""Shortest window that leaves no doubt, in seconds."""
WIDE_SHARE = 0.05
"""Half-width of an interval, as a share of its value, above which a measurement is
doubtful."""
VERY_WIDE_SHARE = 0.15
"""Half-width of an interval, as a share of its value, above which a measurement is
poor."""
ENOUGH_STEPS = 30
"""Fewest steps of a run that show a bottleneck better than the windows of a tuning."""
USUAL_BUDGET_S = 600.0
"""Least time limit of a command that measures again, in seconds."""

RepeatablePhase = Literal["probe", "workers", "confirm", "baseline"]
"""Phases that a command repeats, in the order of a tuning; later ones rest on earlier
ones."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason to doubt the measurements of a tuning."""

    reason: str
    phase: RepeatablePhase | None = None
    """Phase to repeat; None if repeating is no help."""
    is_serious: bool = False


_NOT_PROBED = Doubt("the micro-batch was not probed", "probe", is_serious=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Quality of a tuning's measurements."""

    grade: Literal["high", "medium", "low"]
    reasons: tuple[str, ...]
    command: str | None
    """Command that measures again; None if nothing has to be."""


def main_bottleneck(
    reported: ReportedProfile, runs: Sequence[ReportedRun]
) -> Bottleneck | None:
    """Return a profile's bottleneck.

    It is that of the longest run with its settings and ranks, or else of the tuning's
    windows.
    """
    candidates = [
        bottleneck
        for run in runs
        if run.profile_path == reported.path
        and not run.other_settings
        and run.run.header.world_size == reported.profile.local_ranks
        for bottleneck in run.bottlenecks
        if bottleneck.steps >= ENOUGH_STEPS
    ]
    if candidates:
        return max(candidates, key=lambda bottleneck: bottleneck.steps)
    return reported.bottlenecks[0] if reported.bottlenecks else None


def quality_of(reported: ReportedProfile) -> Quality:
    """Grade a tuning.

    It is ``low`` for one serious doubt or three others, ``medium`` for fewer, else
    ``high``.
    """
    doubts = list(_doubts(reported))
    grade: Literal["high", "medium", "low"] = "high"
    if len(doubts) > 2 or any(doubt.is_serious for doubt in doubts):
        grade = "low"
    elif doubts:
        grade = "medium"
    doubtful = {doubt.phase for doubt in doubts}
    phases: tuple[RepeatablePhase, ...] = get_args(RepeatablePhase)
    commands = [
        _command_to_repeat(reported, phase) for phase in phases if phase in doubtful
    ]
    return Quality(
        grade=grade,
        reasons=tuple(doubt.reason for doubt in doubts),
        command=commands[0] if commands else None,
    )


def _command_to_repeat(reported: ReportedProfile, phase: RepeatablePhase) -> str:
    """Return the command that measures a phase again, in windows twice as long.

    Windows as long as before would be reused from the trial log.
    """
    if phase == "probe":
        return probe_command(reported.profile, reported.path)
    evidence = reported.profile.evidence
    if phase == "workers" and not reported.profile.has_train:
        return _own_workers_command(reported, evidence.workers)
    budget_s = USUAL_BUDGET_S
    if phase == "confirm":
        windows_s = [CONFIRM_WINDOW_S]
        if evidence.confirm is not None:
            windows_s.append(2 * evidence.confirm.window_s)
            budget_s = max(budget_s, 2 * evidence.confirm.seconds)
    else:
        windows_s = [WINDOW_S]
        if evidence.workers is not None:
            windows_s.append(2 * evidence.workers.window_s)
        if evidence.baseline is not None:
            windows_s.append(2 * evidence.baseline.window_s)
    return command(
        phase,
        reported.path,
        window=f"{max(windows_s):g}s",
        time_limit=f"{math.ceil(budget_s / 60)}min",
    )


def _own_workers_command(
    reported: ReportedProfile, workers: WorkersEvidence | None
) -> str:
    """Return the command that sweeps the workers of your own loader, longer if again.

    With the same windows, those in the trial log count, so that more time adds rounds.
    """
    if workers is None:
        return workers_command(reported.profile, reported.path)
    budget_s = max(USUAL_BUDGET_S, 2 * workers.seconds)
    return workers_command(
        reported.profile,
        reported.path,
        window=f"{workers.window_s:g}s",
        time_limit=f"{math.ceil(budget_s / 60)}min",
    )


def _doubts(reported: ReportedProfile) -> Iterator[Doubt]:
    """Yield the doubts about a tuning's measurements."""
    evidence = reported.profile.evidence
    if evidence.probe is None:
        yield _NOT_PROBED
    else:
        yield from _doubts_on_probe(evidence.probe, reported.profile.subject)
    yield from _doubts_on_workers(evidence.workers)
    yield from _disturbances(reported.trials, "baseline")
    yield from _doubts_on_baseline(evidence.baseline)
    rate = tuned_rate(reported.profile)
    if rate is not None:
        # Only another confirmation changes a rate that a confirmation measured.
        is_confirmed = rate.read_from == "confirmed"
        phase: RepeatablePhase = "confirm" if is_confirmed else "baseline"
        yield from _wide_interval(
            "throughput", rate.interval, phase, measurements=rate.estimate.n
        )
    yield from _wide_speedups(evidence.baseline)
    yield from _doubts_on_promise(evidence.confirm)


def _doubts_on_probe(probe: ProbeEvidence, subject: SubjectTable) -> Iterator[Doubt]:
    """Yield the doubts about the largest size, and about rates of smaller ones."""
    if probe.infeasible_min is None:
        yield Doubt("larger sizes were not tried")
    if probe.varies_bytes:
        yield Doubt("steps of one size differ in memory")
    if probe.dip is not None and not probe.dip.kernels:
        yield Doubt(dip_words(probe.dip, subject))


def _doubts_on_promise(confirm: ConfirmEvidence | None) -> Iterator[Doubt]:
    """Yield the doubt about a promise that training did not keep."""
    if confirm is not None and confirm.is_kept is False:
        words = confirmed_words(confirm)
        yield Doubt(f"outside the promised interval: {words}", "confirm")


def _disturbances(
    trials: Sequence[FinishedTrial], phase: RepeatablePhase
) -> Iterator[Doubt]:
    """Yield the doubts about trials beside other load; ``phase`` measures again."""
    yield from _busy_hosts(trials, phase)
    disturbed = sum(isinstance(finished.outcome, Contaminated) for finished in trials)
    if disturbed:
        words = plural(disturbed, "trial")
        yield Doubt(f"{words} disturbed by other load or throttling", phase)


def _doubts_on_workers(workers: WorkersEvidence | None) -> Iterator[Doubt]:
    """Yield a doubt if the number of DataLoader workers is not known."""
    if workers is None:
        yield Doubt("DataLoader workers were not measured", "workers")
    elif workers.undecided_between:
        counts = " or ".join(map(str, workers.undecided_between))
        yield Doubt(f"{counts} workers: undecided", "workers")


def _doubts_on_baseline(baseline: BaselineEvidence | None) -> Iterator[Doubt]:
    """Yield the doubts about a comparison with few or short windows, or without one."""
    tuned = row_of(baseline, TUNED)
    if baseline is None or tuned is None:
        yield Doubt("not compared with untuned settings", "baseline")
        return
    windows = len(tuned.units_per_s)
    if windows < FEW_WINDOWS:
        yield Doubt(
            f"only {plural(windows, 'window')} each",
            "baseline",
            is_serious=windows < MIN_WINDOWS,
        )
    if baseline.window_s < SHORT_WINDOW_S:
        duration = format_seconds(baseline.window_s)
        yield Doubt(f"windows of only {duration}", "baseline")


def _wide_speedups(baseline: BaselineEvidence | None) -> Iterator[Doubt]:
    """Yield a doubt for each speedup that may be none, or is known only roughly."""
    if baseline is None:
        return
    for row in baseline.rows:
        speedup = row.bounded_speedup
        if row.name == TUNED or speedup is None:
            continue
        name = f"speedup over {row.words}"
        low = speedup.low
        high = speedup.high
        if low is not None and high is not None and low <= 1 <= high:
            yield Doubt(
                f"the {name} may be none: its interval includes 1",
                "baseline",
                is_serious=True,
            )
        else:
            yield from _wide_interval(
                name, speedup, "baseline", measurements=len(row.units_per_s)
            )


def _wide_interval(
    name: str, interval: Interval, phase: RepeatablePhase, *, measurements: int
) -> Iterator[Doubt]:
    """Yield a doubt if a value is known only roughly.

    Args:
        name: Name of the value, in words.
        interval: The value, without bounds if they would be too wide to use.
        phase: Phase that measured it.
        measurements: Number of measurements. Less than three never have bounds; other
            doubts say so.
    """
    if interval.low is None or interval.high is None:
        if measurements >= MIN_WINDOWS:
            yield Doubt(f"{name} {TOO_NOISY}", phase, is_serious=True)
        return
    half_width = (interval.high - interval.low) / 2 / interval.value
    if half_width > WIDE_SHARE:
        yield Doubt(
            f"{name} known only within ±{format_share(half_width)}",
            phase,
            is_serious=half_width > VERY_WIDE_SHARE,
        )


def _busy_hosts(
    trials: Sequence[FinishedTrial], phase: RepeatablePhase
) -> Iterator[Doubt]:
    """Yield a doubt if trials ran beside other programs: the highest load."""
    sites = [
        trial.made_on
        for trial in trials
        if trial.made_on is not None and trial.made_on.load_average_1min is not None
    ]
    busiest = max(sites, key=lambda site: site.load_average_1min or 0.0, default=None)
    if busiest is None or busiest.load_average_1min is None:
        return
    load = busiest.load_average_1min
    cpus = busiest.allotted_cpus
    if is_busy(load, cpus):
        words = f"load average {load:.2f} with {cpus} CPU cores"
        yield Doubt(f"the machine was busy when a command began: {words}", phase)
