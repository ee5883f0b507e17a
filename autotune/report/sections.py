"""The answer of a tuning.

It is on the first screen of a report, in a pull request, and in the summary of `tune`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

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
from autotune.evidence.baseline import (
    BASELINE_WORDS,
    UNTUNED,
    BaselineEvidence,
    BaselineRow,
    row_of,
)
from autotune.evidence.probe import LOWER_BOUND
from autotune.evidence.profile import Profile
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.follow_up import (
    command,
    missing_probe_commands,
    workers_command,
)
from autotune.profiles.decide.rates import tuned_rate
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.decide import main_bottleneck, quality_of
from autotune.report.values import ReportedRun
from autotune.trials.outcomes import describe

URGENT = SEVERITIES[:2]
"""Severities of advice to follow before training."""


def answer(
    one: ReportedProfile, runs: Sequence[ReportedRun], unmeasured: Sequence[str]
) -> tuple[doc.Block, ...]:
    """Return a model's first screen.

    It has speedup, charts, settings, bottleneck, memory, cost, quality, and the next
    command.
    """
    found = main_bottleneck(one, runs)
    charts = []
    for chart in (
        block for block in baseline_section(one) if isinstance(block, doc.Chart)
    ):
        drawing = chart.drawing
        if isinstance(drawing, doc.BarChart):
            drawing = replace(drawing, axis=replace(drawing.axis, label=""))
        title = "tokens/s before and after (95 % intervals)"
        charts.append(replace(chart, title=title, drawing=drawing, small=True))
    charts += [step_chart([("", found)], small=True)] if found is not None else []
    outcomes = Counter(describe(done.outcome) for done in one.trials)
    trials = (
        ", ".join(f"{number:,} {name}" for name, number in outcomes.most_common())
        or "none"
    )
    trials += "." + (f" Not measured: {', '.join(unmeasured)}." if unmeasured else "")
    pairs = [*_answers(one, runs), ("Trials", (trials,))]
    beside = (
        (doc.SideBySide(groups=tuple((chart,) for chart in charts)),) if charts else ()
    )
    return (
        doc.Paragraph(words=_headline(one), large=True),
        *beside,
        doc.Pairs(pairs=tuple(pairs)),
    )


def pull_request(
    one: ReportedProfile, runs: Sequence[ReportedRun]
) -> tuple[doc.Block, ...]:
    """Return the answer in five lines, for a pull request."""
    known = dict(_answers(one, runs))
    lines = [
        (f"{name}: ", *known[name]) for name in ("Use", "Bottleneck", "Quality", "Next")
    ]
    return (
        doc.Paragraph(words=(doc.Strong(text=one.name), ": ", *_headline(one))),
        doc.Bullets(items=tuple(lines)),
    )


def _headline(one: ReportedProfile) -> doc.Words:
    if not one.profile.has_train:
        return (doc.Strong(text=_own_values(one.profile)),)
    rate, words = tuned_rate(one.profile), list[str | doc.Code | doc.Strong]()
    if rate is None:
        command = next(
            iter(missing_probe_commands(one.profile, one.path)),
            f"autotune baseline {one.quoted}",
        )
        return ("Throughput was not measured: ", doc.Code(text=command))
    baseline = one.profile.evidence.baseline
    for row in _headline_rows(baseline):
        called = row.words
        words.append(" and " * bool(words))
        if (times := row.bounded_speedup) is None:
            words.append(f"no comparison with {called} ({row.outcome})")
            continue
        again = any(isinstance(word, doc.Strong) for word in words)
        level = "" if again else f"{100 * SHOWN_CONFIDENCE:g} % interval "
        between = format_bounds(times.low, times.high, format_ratio)
        told = (
            f"{'that' if again else 'the throughput'} of {called}"
            f" ({level + between if between else NOT_ENOUGH})"
        )
        words += [doc.Strong(text=format_times(times.value)), f" {told}"]
    between = format_bounds(rate.interval.low, rate.interval.high, format_number)
    origin = {
        "confirmed": "",
        "training": "",
        "windows": "by the worker sweep",
        "steps": "by steps of the probe",
    }[rate.read_from]
    advised = "advise" in one.profile.provenance.commands and rate.read_from == "steps"
    stale = "" if one.intact else "before the profile was edited by hand"
    notes = (
        between,
        plural(rate.ranks, one.unit),
        origin,
        stale or "before advice changed the settings" * advised,
    )
    told = ", ".join(note for note in notes if note)
    return (
        *words,
        ": " if words else "",
        doc.Strong(text=f"{format_number(rate.value)} tokens/s"),
        f" ({told}).",
    )


def _headline_rows(baseline: BaselineEvidence | None) -> list[BaselineRow]:
    """Return the rows that a headline names: untuned settings, then other trainers."""
    rows = [row_of(baseline, name) for name in (UNTUNED, "hf-trainer", "paper")]
    return [row for row in rows if row is not None]


def _answers(
    one: ReportedProfile, runs: Sequence[ReportedRun]
) -> Iterator[tuple[str, doc.Words]]:
    """Yield the answers below the charts, by name."""
    yield "Use", _settings(one) if one.profile.has_train else _own_settings(one)
    if changes := recipe_changes(one):
        yield "Recipe", ("; ".join(changes),)
    if (confirm := one.profile.evidence.confirm) is not None:
        yield "Promise", (confirmed_words(confirm),)
    found = main_bottleneck(one, runs)
    yield "Bottleneck", ("not measured",) if found is None else bottleneck_words(found)
    yield "Memory", (_memory(one),)
    if spent_s := sum(row.rank_seconds for row in cost_rows(one.trials)):
        yield "Cost", (_cost(one, spent_s),)
    quality, following = quality_of(one), _next_command(one, runs)
    again: doc.Words = (
        ()
        if quality.command is None
        else (" Measure again: ", doc.Code(text=quality.command))
    )
    again = (
        (" Measure again with the next command.",)
        if quality.command == following
        else again
    )
    reasons = "; ".join(quality.reasons) or "enough windows, narrow intervals"
    yield "Quality", (doc.Strong(text=quality.grade), f": {reasons}.", *again)
    yield "Next", (doc.Code(text=following),)


def _next_command(one: ReportedProfile, runs: Sequence[ReportedRun]) -> str:
    """Return the one command to run next.

    It is that of the first worthwhile advice, a better measurement, or training.
    """
    given = [
        *one.advice,
        *(
            advice
            for run in runs
            if run.profile_path == one.path
            for advice in run.advice
        ),
    ]
    advised = (
        advice.command
        for advice in given
        if advice.severity in URGENT and advice.command is not None
    )
    quality = quality_of(one)
    again = quality.command if quality.grade == "low" else None
    following = f"autotune train {one.quoted}"
    if not one.profile.has_train:
        lacks_workers = one.profile.evidence.workers is None
        following = (
            workers_command(one.profile, one.path)
            if lacks_workers
            else command("profile approve", one.path, by="NAME")
        )
    return next(advised, again or following)


def _own_values(profile: Profile) -> str:
    """Return the tuned values of your code on one line."""
    values = [
        f"{name} {format_setting(value)}" for name, value in profile.settings.items()
    ]
    return " · ".join(values)


def _own_settings(one: ReportedProfile) -> doc.Words:
    """Return the tuned values of your code with their limits, and what is lacking."""
    probe, workers = one.profile.evidence.probe, one.profile.evidence.workers
    notes = []
    if probe is not None:
        notes.append(f"max {probe.feasible_max:,}")
    if workers is None:
        notes.append("workers not measured")
    elif workers.undecided_between:
        counts = " and ".join(map(str, workers.undecided_between))
        notes.append(f"workers undecided between {counts}")
    rest = f" ({'; '.join(notes)})" if notes else ""
    return (doc.Strong(text=_own_values(one.profile)), rest)


def _settings(one: ReportedProfile) -> doc.Words:
    train, evidence = one.profile.train, one.profile.evidence
    workers, sync = (
        evidence.workers,
        f"{train.parallel.strategy}, {train.parallel.gradient_dtype} gradients",
    )
    most = "" if evidence.probe is None else f" (max {evidence.probe.feasible_max:,})"
    doubt = "" if workers else " (not measured)"
    if workers is not None and workers.undecided_between:
        doubt = (
            f" (undecided between {' and '.join(map(str, workers.undecided_between))})"
        )
    parts = {
        f"{plural(train.data.num_workers, 'worker')}{doubt}": True,
        f"prefetch {train.data.prefetch_factor}": (
            workers and workers.joint and workers.joint.adopted
        ),
        f"{train.layout}, {train.seq_length_tokens} tokens": True,
        train.precision: True,
        "compiled": train.compiled,
        f"{train.activation_checkpointing} checkpointing": (
            train.activation_checkpointing != "none"
        ),
        f"global batch {_batch(one.profile)}": True,
        sync + " (not measured)" * (evidence.network is None): (
            one.profile.local_ranks > 1
        ),
    }
    chosen = " · ".join(part for part, applies in parts.items() if applies)
    return (
        doc.Strong(text=f"micro-batch {train.micro_batch_size:,}{most}"),
        f" · {chosen}",
    )


def recipe_changes(one: ReportedProfile) -> list[str]:
    """Return a profile's changes to the model's recipe and to 32-bit gradients.

    They gained speed at a price.
    """
    if not one.profile.has_train:
        return []
    train, network = one.profile.train, one.profile.evidence.network
    changes = []
    if train.attention_dropout is not None:
        changes.append(
            f"attention dropout {train.attention_dropout:g} instead of the model's own"
        )
    if train.float8 != "none":
        changes.append(f"linear layers in float8 ({train.float8})")
    if train.parallel.gradient_dtype != "fp32":
        equal = (
            ""
            if network is None or network.equal_loss is None
            else f"; equal loss: {network.equal_loss}"
        )
        changes.append(
            f"{train.parallel.gradient_dtype} gradients instead of fp32{equal}"
        )
    return changes


def bottleneck_words(found: Bottleneck) -> doc.Words:
    """Return the bottleneck, its share of a step, the MFU, and the source."""
    part, doubt = found.part(found.limit), "" if found.decided else " (not certain)"
    share = "" if part is None else f", {100 * part.share:.0f} % of the step"
    mfu = (
        "" if found.mfu is None else f"; MFU {format_interval(found.mfu, format_share)}"
    )
    return (
        doc.Strong(text=CAUSE_NAMES[found.limit]),
        f"{share}{doubt}{mfu} ({found.source})",
    )


def _memory(one: ReportedProfile) -> str:
    probe = one.profile.evidence.probe
    budget_bytes = one.profile.constraints.memory_budget_bytes
    if budget_bytes is None:
        return "not measured"
    budget = format_bytes(budget_bytes)
    if probe is None:
        return f"not measured; the budget is {budget} per {one.unit}"
    known = (
        ""
        if one.profile.fingerprint.bytes_known == "measured"
        else ", by torch's allocator"
    )
    limit = ""
    if probe.is_lower_bound:
        limit = f" ({LOWER_BOUND})"
    elif probe.infeasible_min is not None:
        limit = f"; {probe.infeasible_min:,} run out of memory"
    peak = format_bytes(probe.feasible_peak_bytes)
    return (
        f"{peak} of {budget} per {one.unit}{known} with"
        f" {one.profile.subject.size_words(probe.feasible_max)}{limit}"
    )


def _cost(one: ReportedProfile, spent_s: float) -> str:
    ranks = one.profile.local_ranks
    spent = f"{format_hours(spent_s / 3600)} of trials" + (
        f", in {one.unit}-hours" if ranks > 1 else ""
    )
    found = pay_back(spent_s, one.profile.evidence.baseline)
    if found is None:
        return spent
    if found.rank_hours is None:
        return (
            f"{spent}; the tuned settings are not faster than untuned ones, so it does"
            " not pay for itself"
        )
    every = f" on {plural(ranks, one.unit)}" if ranks > 1 else ""
    after = Interval.from_bounds(
        found.rank_hours, found.rank_hours_low, found.rank_hours_high, SHOWN_CONFIDENCE
    )
    said = format_interval(
        after.scaled(1 / ranks), hours_formatter(found.rank_hours / ranks)
    )
    return f"{spent}; pays for itself after {said} of training{every} (predicted)"


def step_chart(
    named: Sequence[tuple[str, Bottleneck]], *, small: bool = False
) -> doc.Chart:
    """Return a bar of the parts of a step for each bottleneck."""
    stacks, said = [], []
    for name, found in named:
        shares = {part.cause: part.share for part in found.parts}
        parts = tuple(
            (words, shares[one])
            for one, words in CAUSE_NAMES.items()
            if shares.get(one, 0.0) > 0
        )
        stacks.append(doc.Stack(label=name, parts=parts))
        told = ", ".join(
            f"{CAUSE_NAMES[part.cause]} {format_share(part.share)}"
            for part in found.parts
        )
        said.append(f"{name}: {told}." if name else f"{told}.")
    return doc.Chart(
        title="Parts of a step's time",
        description=" ".join(said),
        small=small,
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="" if small else "share of a step", unit="share"),
            stacks=tuple(stacks),
        ),
        table=doc.table_of(
            "Parts of a step",
            [(name, part) for name, found in named for part in found.parts],
            ("step of", "l", lambda one: one[0]),
            ("part", "l", lambda one: CAUSE_NAMES[one[1].cause]),
            ("share", "r", lambda one: format_share(one[1].share)),
            (
                "95 % interval",
                "r",
                lambda one: format_bounds(one[1].low, one[1].high, format_share),
            ),
            ("source", "l", lambda one: one[1].source or None),
        ),
    )


def own_summary_table(profiles: Sequence[Profile]) -> doc.Table:
    """Return the tuned values of your code, with the promised and delivered rate."""

    def confirmed(profile: Profile) -> str | None:
        confirm = profile.evidence.confirm
        return None if confirm is None else confirmed_words(confirm)

    return doc.table_of(
        "",
        profiles,
        ("your code", "l", lambda one: one.subject.words),
        ("values", "l", _own_values),
        (
            "max",
            "r",
            lambda one: (
                None
                if one.evidence.probe is None
                else f"{one.evidence.probe.feasible_max:,}"
            ),
        ),
        ("throughput", "l", confirmed),
    )


def summary_table(profiles: Sequence[Profile], names: Sequence[str]) -> doc.Table:
    """Return each profile's settings, throughput and speedups with 95 % intervals.

    A missing speedup was not measured.
    """
    return doc.table_of(
        "",
        zip(names, profiles, strict=True),
        ("model", "l", lambda one: one[0]),
        (
            "max micro-batch",
            "r",
            lambda one: (
                f"{found.feasible_max:,}" if (found := one[1].evidence.probe) else None
            ),
        ),
        ("batch", "r", lambda one: _batch(one[1])),
        (
            "workers",
            "r",
            lambda one: (
                str(one[1].train.data.num_workers) if one[1].evidence.workers else None
            ),
        ),
        (
            "tokens/s",
            "r",
            lambda one: (
                bounded(rate.interval, format_number)
                if (rate := tuned_rate(one[1]))
                else None
            ),
        ),
        *_speedup_columns(profiles),
    )


def _batch(profile: Profile) -> str:
    train, ranks = profile.train, profile.local_ranks
    if train.global_batch_size < ranks:
        return f"{train.global_batch_size:,}"  # edited by hand: it cannot be split
    split = split_global_batch(train.global_batch_size, train.micro_batch_size, ranks)
    return split.words(ranks)


def _speedup_columns(
    profiles: Sequence[Profile],
) -> list[tuple[str, str, Callable[[tuple[str, Profile]], str | None]]]:
    """Return a column for each baseline that a profile was compared with."""
    names = [
        name
        for name in BASELINE_WORDS
        if any(row_of(one.evidence.baseline, name) for one in profiles)
    ]
    return [
        (f"vs {name}", "r", functools.partial(_row_times, name))
        for name in names or [UNTUNED]
    ]


def _row_times(name: str, named: tuple[str, Profile]) -> str | None:
    return _times(named[1], name)


def _times(profile: Profile, name: str) -> str | None:
    row = row_of(profile.evidence.baseline, name)
    return bounded(row.bounded_speedup if row else None, format_times)


def bounded(known: Interval | None, form: Callable[[float], str]) -> str | None:
    """Format a value with its bounds, and their confidence unless it is 95 %."""
    if known is None:
        return None
    between = format_bounds(known.low, known.high, form)
    level = (
        ""
        if known.confidence == SHOWN_CONFIDENCE
        else f", {format_confidence(known.confidence)}"
    )
    return form(known.value) + (f" ({between}{level})" if between else "")
