"""The answer of a tuning: its speed, its settings, and what to run next.

``answer`` is the first screen of a report, ``pull_request`` its short form, and
``summary_table`` the table that `tune` prints at its end.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.advice.sections import CAUSE_NAMES
from autotune.base import document as doc
from autotune.base.interval import NOT_ENOUGH, SHOWN_CONFIDENCE, Interval
from autotune.base.severity import SEVERITIES
from autotune.base.units import format_bytes, format_share
from autotune.base.wording import (
    format_bounds,
    format_confidence,
    format_hours,
    format_interval,
    format_number,
    format_ratio,
    format_setting,
    format_times,
    hours_formatter,
    plural,
)
from autotune.baseline.decide.pay_back import cost_rows, pay_back
from autotune.baseline.sections import baseline_section
from autotune.confirm.decide import confirmed_words
from autotune.evidence.advice import Bottleneck
from autotune.evidence.argument import Argument
from autotune.evidence.baseline import (
    BASELINE_WORDS,
    UNTUNED,
    BaselineEvidence,
    BaselineRow,
    row_of,
)
from autotune.evidence.probe import LOWER_BOUND
from autotune.evidence.profile import Profile
from autotune.profiles.decide.batch_split import profile_split
from autotune.profiles.decide.follow_up import (
    command,
    missing_probe_commands,
    workers_command,
)
from autotune.profiles.decide.rates import Rate, tuned_rate, unit_of_rate
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.decide import Quality, main_bottleneck, quality_of
from autotune.report.values import ReportedRun
from autotune.trials.outcomes import describe
from autotune.trials.values import FinishedTrial

URGENT = SEVERITIES[:2]
"""Severities of advice to follow before training."""
_RATE_ORIGINS = {
    "confirmed": "",
    "training": "",
    "windows": "by the worker sweep",
    "steps": "by steps of the probe",
}
"""Words for the origin of a tuned rate; none if it was measured in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SummaryRow:
    """A profile in the summary table, with its tuned rate."""

    profile: Profile
    rate: Rate | None

    @property
    def num_workers(self) -> str | None:
        if self.profile.evidence.workers is None:
            return None
        return str(self.profile.num_workers)

    @property
    def rate_text(self) -> str | None:
        if self.rate is None:
            return None
        return format_bounded(self.rate.interval, format_number)

    @property
    def unit(self) -> str:
        if self.rate is None:
            return f"{self.profile.subject.unit}/s"
        return unit_of_rate(self.profile, self.rate)

    @property
    def other_settings(self) -> str | None:
        """Tuned values of your code without a column."""
        shown = (self.profile.subject.size, "num_workers")
        others = {
            name: value
            for name, value in self.profile.settings.items()
            if name not in shown
        }
        return _values_text(others) or None


_SummaryColumn = tuple[str, str, Callable[[_SummaryRow], str | None]]
"""Header, alignment, and the function that returns the cell of a row."""


def answer(
    reported: ReportedProfile, runs: Sequence[ReportedRun], unmeasured: Sequence[str]
) -> tuple[doc.Block, ...]:
    """Return the first screen of a profile.

    It has the speedup, charts, settings, bottleneck, memory, cost, quality, and the
    next command. ``unmeasured`` are the names of the parts that have no figures.
    """
    charts = _baseline_charts(reported)
    bottleneck = main_bottleneck(reported, runs)
    if bottleneck is not None:
        charts.append(step_chart([("", bottleneck)], small=True))
    trials = _trial_counts(reported.trials)
    if unmeasured:
        trials += f" Not measured: {', '.join(unmeasured)}."
    pairs = (*_answers(reported, runs), ("Trials", (trials,)))
    blocks: list[doc.Block] = [doc.Paragraph(words=_headline(reported), large=True)]
    if charts:
        blocks.append(doc.SideBySide(groups=tuple((chart,) for chart in charts)))
    blocks.append(doc.Pairs(pairs=pairs))
    return tuple(blocks)


def pull_request(
    reported: ReportedProfile, runs: Sequence[ReportedRun]
) -> tuple[doc.Block, ...]:
    """Return the answer in five lines, for a pull request."""
    answers = dict(_answers(reported, runs))
    lines = [
        (f"{name}: ", *answers[name])
        for name in ("Use", "Bottleneck", "Quality", "Next")
    ]
    headline = (doc.Strong(text=reported.name), ": ", *_headline(reported))
    return (doc.Paragraph(words=headline), doc.Bullets(items=tuple(lines)))


def _baseline_charts(reported: ReportedProfile) -> list[doc.Chart]:
    """Return the charts of the comparison with baselines, small enough for a column."""
    charts = []
    for block in baseline_section(reported):
        if not isinstance(block, doc.Chart):
            continue
        drawing = block.drawing
        if isinstance(drawing, doc.BarChart):
            drawing = replace(drawing, axis=replace(drawing.axis, label=""))
        title = "tokens/s before and after (95 % intervals)"
        charts.append(replace(block, title=title, drawing=drawing, small=True))
    return charts


def _trial_counts(trials: Sequence[FinishedTrial]) -> str:
    """Return the number of trials of each outcome, the most frequent first."""
    if not trials:
        return "none."
    outcomes = Counter(describe(finished.outcome) for finished in trials)
    counts = [f"{number:,} {outcome}" for outcome, number in outcomes.most_common()]
    return f"{', '.join(counts)}."


def _headline(reported: ReportedProfile) -> doc.Words:
    """Return the speedups and the throughput of the tuned settings."""
    profile = reported.profile
    rate = tuned_rate(profile)
    if rate is None:
        return ("Throughput was not measured: ", doc.Code(text=_measuring(reported)))
    comparisons = _comparisons(profile)
    return (
        *comparisons,
        ": " if comparisons else "",
        doc.Strong(text=f"{format_number(rate.value)} {unit_of_rate(profile, rate)}"),
        f" ({_rate_notes(reported, rate)}).",
    )


def _measuring(reported: ReportedProfile) -> str:
    """Return the command that measures the throughput of a profile."""
    profile = reported.profile
    missing = missing_probe_commands(profile, reported.path)
    if missing:
        return missing[0]
    return command("confirm", reported.path)


def _comparisons(profile: Profile) -> doc.Words:
    """Return the speedup over each baseline; empty if there was no comparison."""
    words: list[str | doc.Code | doc.Strong] = []
    is_first_speedup = True
    for row in _headline_rows(profile.evidence.baseline):
        if words:
            words.append(" and ")
        speedup = row.bounded_speedup
        if speedup is None:
            words.append(f"no comparison with {row.words} ({row.outcome})")
            continue
        # Only the first speedup names the quantity and the level of its interval.
        quantity = "the throughput" if is_first_speedup else "that"
        bounds = format_bounds(speedup.low, speedup.high, format_ratio)
        if bounds is None:
            interval = NOT_ENOUGH
        elif is_first_speedup:
            interval = f"{100 * SHOWN_CONFIDENCE:g} % interval {bounds}"
        else:
            interval = bounds
        words.append(doc.Strong(text=format_times(speedup.value)))
        words.append(f" {quantity} of {row.words} ({interval})")
        is_first_speedup = False
    return tuple(words)


def _headline_rows(baseline: BaselineEvidence | None) -> list[BaselineRow]:
    """Return the rows that a headline names: untuned settings, then other trainers."""
    rows = [row_of(baseline, name) for name in (UNTUNED, "hf-trainer", "paper")]
    return [row for row in rows if row is not None]


def _rate_notes(reported: ReportedProfile, rate: Rate) -> str:
    """Return a rate's bounds, ranks and origin, and why it may be out of date."""
    notes = [
        format_bounds(rate.interval.low, rate.interval.high, format_number),
        plural(rate.ranks, reported.unit),
        _RATE_ORIGINS[rate.read_from],
    ]
    was_advised = "advise" in reported.profile.provenance.commands
    if not reported.intact:
        notes.append("before the profile was edited by hand")
    elif was_advised and rate.read_from == "steps":
        notes.append("before advice changed the settings")
    return ", ".join(note for note in notes if note)


def _answers(
    reported: ReportedProfile, runs: Sequence[ReportedRun]
) -> Iterator[tuple[str, doc.Words]]:
    """Yield the answers below the charts, by name."""
    profile = reported.profile
    settings = _settings(reported) if profile.has_train else _own_settings(profile)
    yield "Use", settings
    changes = recipe_changes(reported)
    if changes:
        yield "Recipe", ("; ".join(changes),)
    if profile.evidence.confirm is not None:
        yield "Promise", (confirmed_words(profile.evidence.confirm),)
    bottleneck = main_bottleneck(reported, runs)
    if bottleneck is None:
        yield "Bottleneck", ("not measured",)
    else:
        yield "Bottleneck", bottleneck_words(bottleneck)
    yield "Memory", (_memory(reported),)
    spent_s = sum(row.rank_seconds for row in cost_rows(reported.trials))
    if spent_s:
        yield "Cost", (_cost(reported, spent_s),)
    next_command = _next_command(reported, runs)
    yield "Quality", _quality_words(quality_of(reported), next_command)
    yield "Next", (doc.Code(text=next_command),)


def _quality_words(quality: Quality, next_command: str) -> doc.Words:
    """Return the grade, its reasons, and the command that measures again, if any."""
    reasons = "; ".join(quality.reasons) or "enough windows, narrow intervals"
    grade = (doc.Strong(text=quality.grade), f": {reasons}.")
    if quality.command is None:
        return grade
    if quality.command == next_command:
        return (*grade, " Measure again with the next command.")
    return (*grade, " Measure again: ", doc.Code(text=quality.command))


def _next_command(reported: ReportedProfile, runs: Sequence[ReportedRun]) -> str:
    """Return the one command to run next.

    It is that of the first worthwhile advice, a better measurement, or training.
    """
    advice_in_order = list(reported.advice)
    for run in runs:
        if run.profile_path == reported.path:
            advice_in_order.extend(run.advice)
    for advice in advice_in_order:
        if advice.severity in URGENT and advice.command is not None:
            return advice.command
    quality = quality_of(reported)
    if quality.grade == "low" and quality.command is not None:
        return quality.command
    if reported.profile.has_train:
        return f"autotune train {reported.quoted}"
    if reported.profile.evidence.workers is None:
        return workers_command(reported.profile, reported.path)
    return command("profile approve", reported.path, by="NAME")


def _own_values(profile: Profile) -> str:
    """Return the tuned values of your code on one line."""
    return _values_text(profile.settings)


def _values_text(settings: Mapping[str, Argument]) -> str:
    """Return names and values on one line."""
    return " · ".join(
        f"{name} {format_setting(value)}" for name, value in settings.items()
    )


def _own_settings(profile: Profile) -> doc.Words:
    """Return the tuned values of your code with their limits, and what is lacking."""
    probe = profile.evidence.probe
    workers = profile.evidence.workers
    notes = []
    if probe is not None:
        notes.append(f"max {probe.feasible_max:,}")
    if workers is None:
        notes.append("workers not measured")
    elif workers.undecided_between:
        counts = " and ".join(map(str, workers.undecided_between))
        notes.append(f"workers undecided between {counts}")
    notes_text = f" ({'; '.join(notes)})" if notes else ""
    return (doc.Strong(text=_own_values(profile)), notes_text)


def _settings(reported: ReportedProfile) -> doc.Words:
    """Return the settings of the bundled trainer, and which were not measured."""
    train = reported.profile.train
    evidence = reported.profile.evidence
    micro_batch = f"micro-batch {train.micro_batch_size:,}"
    if evidence.probe is not None:
        micro_batch += f" (max {evidence.probe.feasible_max:,})"
    parts = [_workers_words(reported.profile)]
    if evidence.workers and evidence.workers.joint and evidence.workers.joint.adopted:
        parts.append(f"prefetch {train.data.prefetch_factor}")
    parts.append(f"{train.layout}, {train.seq_length_tokens} tokens")
    parts.append(train.precision)
    if train.compiled:
        parts.append("compiled")
    if train.activation_checkpointing != "none":
        parts.append(f"{train.activation_checkpointing} checkpointing")
    parts.append(f"global batch {_batch(reported.profile)}")
    if reported.profile.local_ranks > 1:
        strategy = train.parallel.strategy
        sync = f"{strategy}, {train.parallel.gradient_dtype} gradients"
        doubt = " (not measured)" if evidence.network is None else ""
        parts.append(sync + doubt)
    return (doc.Strong(text=micro_batch), f" · {' · '.join(parts)}")


def _workers_words(profile: Profile) -> str:
    """Return the number of DataLoader workers, and whether it was measured."""
    words = plural(profile.train.data.num_workers, "worker")
    workers = profile.evidence.workers
    if workers is None:
        return f"{words} (not measured)"
    if workers.undecided_between:
        counts = " and ".join(map(str, workers.undecided_between))
        return f"{words} (undecided between {counts})"
    return words


def recipe_changes(reported: ReportedProfile) -> list[str]:
    """Return a profile's changes to the model's recipe and to 32-bit gradients.

    They gained speed at a price.
    """
    if not reported.profile.has_train:
        return []
    train = reported.profile.train
    network = reported.profile.evidence.network
    changes = []
    if train.attention_dropout is not None:
        changes.append(
            f"attention dropout {train.attention_dropout:g} instead of the model's own"
        )
    if train.float8 != "none":
        changes.append(f"linear layers in float8 ({train.float8})")
    if train.parallel.gradient_dtype != "fp32":
        change = f"{train.parallel.gradient_dtype} gradients instead of fp32"
        if network is not None and network.equal_loss is not None:
            change += f"; equal loss: {network.equal_loss}"
        changes.append(change)
    return changes


def bottleneck_words(bottleneck: Bottleneck) -> doc.Words:
    """Return the bottleneck, its share of a step, the MFU, and the source."""
    part = bottleneck.part(bottleneck.limit)
    details = ""
    if part is not None:
        details += f", {100 * part.share:.0f} % of the step"
    if not bottleneck.decided:
        details += " (not certain)"
    if bottleneck.mfu is not None:
        details += f"; MFU {format_interval(bottleneck.mfu, format_share)}"
    details += f" ({bottleneck.source})"
    return (doc.Strong(text=CAUSE_NAMES[bottleneck.limit]), details)


def _memory(reported: ReportedProfile) -> str:
    """Return the peak memory of the largest size that fits, and the budget."""
    profile = reported.profile
    budget_bytes = profile.constraints.memory_budget_bytes
    if budget_bytes is None:
        return "not measured"
    budget = f"{format_bytes(budget_bytes)} per {reported.unit}"
    probe = profile.evidence.probe
    if probe is None:
        return f"not measured; the budget is {budget}"
    source = ""
    if profile.fingerprint.bytes_known != "measured":
        source = ", by torch's allocator"
    limit = ""
    if probe.is_lower_bound:
        limit = f" ({LOWER_BOUND})"
    elif probe.infeasible_min is not None:
        limit = f"; {probe.infeasible_min:,} run out of memory"
    peak = format_bytes(probe.feasible_peak_bytes)
    size = profile.subject.size_words(probe.feasible_max)
    return f"{peak} of {budget}{source} with {size}{limit}"


def _cost(reported: ReportedProfile, spent_s: float) -> str:
    """Return the time of trials, and after how much training it is regained.

    ``spent_s`` are seconds of trials times their ranks.
    """
    ranks = reported.profile.local_ranks
    spent = f"{format_hours(spent_s / 3600)} of trials"
    if ranks > 1:
        spent += f", in {reported.unit}-hours"
    regained = pay_back(spent_s, reported.profile.evidence.baseline)
    if regained is None:
        return spent
    if regained.rank_hours is None:
        return (
            f"{spent}; the tuned settings are not faster than untuned ones, so it does"
            " not pay for itself"
        )
    rank_hours = Interval.from_bounds(
        regained.rank_hours,
        regained.rank_hours_low,
        regained.rank_hours_high,
        SHOWN_CONFIDENCE,
    )
    hours = format_interval(
        rank_hours.scaled(1 / ranks), hours_formatter(regained.rank_hours / ranks)
    )
    devices = f" on {plural(ranks, reported.unit)}" if ranks > 1 else ""
    return f"{spent}; pays for itself after {hours} of training{devices} (predicted)"


def step_chart(
    bottlenecks: Sequence[tuple[str, Bottleneck]], *, small: bool = False
) -> doc.Chart:
    """Return a bar of the parts of a step for each bottleneck, with its name."""
    stacks = []
    descriptions = []
    for name, bottleneck in bottlenecks:
        stacks.append(doc.Stack(label=name, parts=_parts_by_cause(bottleneck)))
        shares = ", ".join(
            f"{CAUSE_NAMES[part.cause]} {format_share(part.share)}"
            for part in bottleneck.parts
        )
        descriptions.append(f"{name}: {shares}." if name else f"{shares}.")
    named_parts = [
        (name, part) for name, bottleneck in bottlenecks for part in bottleneck.parts
    ]
    return doc.Chart(
        title="Parts of a step's time",
        description=" ".join(descriptions),
        small=small,
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="" if small else "share of a step", unit="share"),
            stacks=tuple(stacks),
        ),
        table=doc.table_of(
            "Parts of a step",
            named_parts,
            ("step of", "l", lambda row: row[0]),
            ("part", "l", lambda row: CAUSE_NAMES[row[1].cause]),
            ("share", "r", lambda row: format_share(row[1].share)),
            (
                "95 % interval",
                "r",
                lambda row: format_bounds(row[1].low, row[1].high, format_share),
            ),
            ("source", "l", lambda row: row[1].source or None),
        ),
    )


def _parts_by_cause(bottleneck: Bottleneck) -> tuple[tuple[str, float], ...]:
    """Return the name and share of each part that takes time, in a fixed order."""
    shares = {part.cause: part.share for part in bottleneck.parts}
    return tuple(
        (name, shares[cause])
        for cause, name in CAUSE_NAMES.items()
        if shares.get(cause, 0.0) > 0
    )


def _largest_size(profile: Profile) -> str | None:
    """Return the largest size that fits; None if it was not measured."""
    probe = profile.evidence.probe
    return None if probe is None else f"{probe.feasible_max:,}"


def summary_table(profiles: Sequence[Profile]) -> doc.Table:
    """Return each profile's settings, throughput and speedups with 95 % intervals.

    All profiles are of one search, whose rates have the same unit. A missing speedup
    was not measured.
    """
    rows = [
        _SummaryRow(profile=profile, rate=tuned_rate(profile)) for profile in profiles
    ]
    size = profiles[0].subject.size
    others: list[_SummaryColumn] = []
    if any(row.other_settings for row in rows):
        others = [("other settings", "l", lambda row: row.other_settings)]
    return doc.table_of(
        "",
        rows,
        ("subject", "l", lambda row: row.profile.subject.words),
        (f"max {size}", "r", lambda row: _largest_size(row.profile)),
        ("batch", "r", lambda row: _batch(row.profile)),
        ("workers", "r", lambda row: row.num_workers),
        *others,
        (rows[0].unit, "r", lambda row: row.rate_text),
        *_speedup_columns(profiles),
    )


def _speedup_columns(profiles: Sequence[Profile]) -> list[_SummaryColumn]:
    """Return a column for each baseline that a profile was compared with."""
    compared = [
        name
        for name in BASELINE_WORDS
        if any(row_of(profile.evidence.baseline, name) for profile in profiles)
    ]
    return [_speedup_column(name) for name in compared or [UNTUNED]]


def _speedup_column(baseline: str) -> _SummaryColumn:
    return (f"vs {baseline}", "r", lambda row: _speedup(row.profile, baseline))


def _batch(profile: Profile) -> str:
    """Return how the global batch is split, or else the size in use.

    If a hand edit broke the split, it is only the global batch.
    """
    ranks = profile.local_ranks
    if profile.has_train and profile.train.global_batch_size < ranks:
        return f"{profile.train.global_batch_size:,}"
    split = profile_split(profile, ranks)
    return str(profile.size) if split is None else split.words(ranks)


def _speedup(profile: Profile, baseline: str) -> str | None:
    """Return the speedup over a baseline with its bounds; None if not measured."""
    row = row_of(profile.evidence.baseline, baseline)
    if row is None or row.bounded_speedup is None:
        return None
    return format_bounded(row.bounded_speedup, format_times)


def format_bounded(interval: Interval, form: Callable[[float], str]) -> str:
    """Format a value with its bounds, and their confidence unless it is 95 %."""
    value = form(interval.value)
    bounds = format_bounds(interval.low, interval.high, form)
    if not bounds:
        return value
    if interval.confidence != SHOWN_CONFIDENCE:
        bounds += f", {format_confidence(interval.confidence)}"
    return f"{value} ({bounds})"
