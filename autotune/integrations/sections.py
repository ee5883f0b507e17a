"""Text and report blocks about your own training code.

They show the largest size, the loader's workers, and the commands to run next.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autotune.base import document as doc
from autotune.base.answer_json import jsonable
from autotune.base.document import bulleted, facts_table, table_of
from autotune.base.render_console import console_text
from autotune.base.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from autotune.base.wording import plural
from autotune.evidence.probe import ProbeEvidence
from autotune.integrations.values import (
    LoaderEvidence,
    OwnProfile,
    Written,
)
from autotune.profiles.approval_record import Approval
from autotune.profiles.decide.follow_up import command
from autotune.profiles.review_text import approval_line
from autotune.trials.outcomes import Measured, describe
from autotune.trials.values import FinishedTrial
from autotune.workers.count_tables import count_head, count_table
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE

if TYPE_CHECKING:
    from autotune.base.tables import Row

_FASTER = 1.1
"""Advantage of half the largest size, or less, in the few timed steps of trials from
which it is mentioned."""
_LIMITED_BY_LOADER = 1.05
"""Gain of the most workers over half as many, below which more of them would not help
either."""


def own_answer(one: Written) -> dict[str, Any]:
    """Return the JSON of a result: the profile, its path, and every trial."""
    trials = [
        {
            "label": done.label,
            "seconds": round(done.seconds, 3),
            "from_trial_log": done.from_trial_log,
            "outcome": done.outcome,
        }
        for done in one.trials
    ]
    answer: dict[str, Any] = jsonable(
        {"profile": one.path, **jsonable(one.profile), "trials": trials}
    )
    return answer


def own_probe_text(found: Sequence[Written]) -> str:
    """Return the results of probes for people.

    Each has a line, with reasons, profiles and next commands.
    """
    known = [
        (one, step) for one in found if (step := one.profile.evidence.step) is not None
    ]
    along = known[0][0].profile.subject.along
    table = table_of(
        "",
        known,
        ("step", "l", lambda one: one[0].profile.subject.words),
        (f"max {along}", "r", lambda one: str(one[1].feasible_max)),
        (
            "out of memory at",
            "r",
            lambda one: str(one[1].infeasible_min) if one[1].infeasible_min else None,
        ),
        (along, "r", lambda one: str(one[0].profile.tuned[along])),
        ("peak memory", "r", lambda one: format_bytes(one[1].feasible_peak_bytes)),
        ("step time", "r", lambda one: _step_time(one[1])),
        ("trials", "r", lambda one: str(len(one[1].sizes))),
        ("time", "r", lambda one: format_seconds(one[1].seconds)),
    )
    reasons = [
        (one.profile.subject.words, (line,))
        for one, _ in known
        for line in step_lines(one.profile)
    ]
    written = [("profile", (str(one.path),)) for one, _ in known]
    following = [
        ("next", (command("workers", one.path, loader="MODULE:build_loader"),))
        for one, _ in known
    ]
    return console_text((table, doc.Pairs(pairs=(*reasons, *written, *following))))


def own_workers_text(one: Written) -> str:
    """Return the result of a sweep for people."""
    found = one.profile.evidence.loader
    assert found is not None
    pairs = (
        ("profile", (str(one.path),)),
        ("next", (f"use num_workers={found.chosen} in your loader",)),
    )
    return console_text((*loader_section(one.profile), doc.Pairs(pairs=pairs)))


def own_profile_text(profile: OwnProfile, approval: Approval, *, intact: bool) -> str:
    """Return the tuned values with their reasons, the machine, and the approval."""
    step, loader = profile.evidence.step, profile.evidence.loader
    why = {
        profile.subject.along: step and step.choice,
        "num_workers": loader and loader.choice,
    }
    rows: list[Row] = [
        [name, str(value), why.get(name) or "not measured"]
        for name, value in profile.tuned.items()
    ]
    if (budget := profile.constraints.memory_budget_bytes) is not None:
        rows.append(["memory budget", format_bytes(budget), ""])
    here, edited = (
        profile.fingerprint,
        "unmodified" if intact else "modified since it was written",
    )
    place = (
        f"{here.gpu_name or here.cpu_model or here.device}, torch {here.torch},"
        f" {profile.provenance.created_utc}"
    )
    functions = ", ".join(
        one
        for one in (profile.subject.step_function, profile.subject.loader_function)
        if one
    )
    table = doc.Table(caption="", headers=("setting", "value", "why"), rows=tuple(rows))
    origin = {
        "your code": functions,
        "measured on": place,
        "content": edited,
        "approval": approval_line(approval),
    }
    return console_text(
        (
            table,
            doc.Pairs(pairs=tuple((name, (text,)) for name, text in origin.items())),
        )
    )


def _step_time(found: ProbeEvidence) -> str | None:
    known = [
        row.step_s
        for row in found.sizes
        if row.size == found.feasible_max and row.step_s
    ]
    return format_seconds(known[-1]) if known else None


def step_lines(profile: OwnProfile) -> Iterator[str]:
    """Yield a line each on the chosen size and on facts about your step."""
    found, along = profile.evidence.step, profile.subject.along
    assert found is not None
    yield found.choice
    where = (
        "each in a fresh process"
        if found.verified_in == "fresh processes"
        else "in one process, twice"
    )
    above = found.infeasible_min or "no larger one"
    yield f"verified: {found.feasible_max} ran, and {above} was out of memory, {where}"
    if found.infeasible_min is None:
        yield (
            "more may fit: larger sizes were not tried (--max-micro-batch-size"
            f" {found.feasible_max})"
        )
    timed = {
        row.size: row.size / row.step_s
        for row in found.sizes
        if row.fits and row.step_s is not None
    }
    if timed and (rate := timed[max(timed)]):
        for size, faster in timed.items():
            if size <= max(timed) / 2 and faster > _FASTER * rate:
                yield (
                    f"larger need not be faster: {along} {size} computed"
                    f" {faster / rate:.2f} times as much per second"
                )
    if found.traced_micro_batch_size is not None:
        yield (
            f"a trace of build_model predicted {found.traced_micro_batch_size} before"
            " any trial"
        )
    if found.not_traced is not None:
        yield f"no prediction from build_model: {found.not_traced}"
    if not found.optimizer_steps:
        yield "none of torch's optimizers took a step: steps were counted by calls"
    if found.varies_bytes:
        yield (
            f"steps of one size differ by {format_bytes(found.varies_bytes)}: a later"
            " step may need more memory"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield (
            "pretended GPU: memory is that of torch's allocator, and nothing was timed"
        )


def step_section(profile: OwnProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the largest size."""
    found, subject = profile.evidence.step, profile.subject
    if found is None:
        commands = (
            command("probe", step=subject.step_function or "MODULE:build_step"),
        )
        return (doc.Missing(subject="Largest size that fits", commands=commands),)
    budget, known = (
        profile.constraints.memory_budget_bytes,
        profile.fingerprint.bytes_known,
    )
    rows: list[Row] = [
        ["memory budget", format_bytes(budget)],
        [f"largest {subject.along}, verified", str(found.feasible_max)],
        [
            f"smallest {subject.along} out of memory",
            str(found.infeasible_min or "none tried"),
        ],
        [
            f"peak memory of the largest, {known}",
            format_bytes(found.feasible_peak_bytes),
        ],
        [
            "peak memory, predicted from smaller trials",
            format_bytes(found.predicted_peak_bytes),
        ],
        [
            f"largest {subject.along}, predicted by a trace",
            None
            if found.traced_micro_batch_size is None
            else str(found.traced_micro_batch_size),
        ],
        ["memory between steps", format_bytes(found.kept_bytes)],
        ["host memory", format_bytes(found.host_peak_bytes)],
        ["verified in", found.verified_in],
        ["time of all trials", format_seconds(found.seconds)],
    ]
    fitted = sorted(
        (row.size, row.peak_bytes) for row in found.sizes if row.fits and row.peak_bytes
    )
    points = tuple(doc.Point(x=size, y=float(peak)) for size, peak in fitted)
    chart = doc.Chart(
        title=f"Memory by {subject.along}",
        description="; ".join(
            f"{format_bytes(peak)} at {size}" for size, peak in fitted
        )
        + ".",
        drawing=doc.LineChart(
            x=doc.Axis(label=subject.along, unit="count", low=0),
            y=doc.Axis(label="peak memory", unit="bytes", low=0),
            lines=(doc.Line(name=known, points=points, colour=0),),
            reference_lines=(
                ()
                if budget is None
                else (doc.ReferenceLine(value=float(budget), label="memory budget"),)
            ),
        ),
        table=table_of(
            "Trials in their order",
            found.sizes,
            (subject.along, "r", lambda row: str(row.size)),
            ("outcome", "l", lambda row: "fits" if row.fits else "out of memory"),
            ("peak memory", "r", lambda row: format_bytes(row.peak_bytes)),
            (
                "step time",
                "r",
                lambda row: None if row.step_s is None else format_seconds(row.step_s),
            ),
        ),
    )
    return (
        facts_table(f"Largest {subject.along}", rows),
        chart,
        bulleted(step_lines(profile)),
    )


def loader_section(profile: OwnProfile) -> tuple[doc.Block, ...]:
    """Return the blocks on the loader's workers, for the console and the report."""
    found = profile.evidence.loader
    if found is None:
        step = command(
            "workers", step=profile.subject.step_function, loader="MODULE:build_loader"
        )
        return (doc.Missing(subject="Number of workers", commands=(step,)),)
    rates = [
        format_count(statistics.median(row.batches_per_s), 2) for row in found.rows
    ]
    table = count_table(found.rows, "batches/s (median)", rates)
    return (
        count_head("Workers", str(found.chosen), found),
        table,
        bulleted(_loader_lines(found)),
    )


def _loader_lines(found: LoaderEvidence) -> Iterator[str]:
    cached = statistics.median(found.cached_batches_per_s)
    yield (
        f"upper bound without data loading (cached batches): {format_count(cached, 2)}"
        " batches/s"
    )
    replayed_s = found.replayed_step_s
    step = (
        "your step"
        if replayed_s is None
        else f"a replayed step of {format_seconds(replayed_s)}"
    )
    yield (
        f"consumer: {step}; {plural(found.windows, 'window')} of at least"
        f" {found.window_s:g} s"
    )
    yield (
        f"largest num_workers allowed: {found.max_workers}"
        f" ({found.max_workers_because})"
    )
    if found.worker_bytes is not None:
        held = f"a worker holds {format_bytes(found.worker_bytes)} of private memory"
        yield f"{held}; a batch has {format_bytes(found.batch_bytes)}"
    if found.epoch_batches is not None:
        yield (
            f"an epoch has {plural(found.epoch_batches, 'batch')}: restarting the"
            " loader is part of its cost"
        )
    idle = [row.num_workers for row in found.rows if row.num_workers > row.processes]
    if idle:
        yield (
            f"with num_workers={idle[-1]} the loader started fewer processes: it"
            " ignores num_workers, or uses threads"
        )
    yield f"GPU: {found.gpu_source}"
    best = max(row.ratio_to_cached for row in found.rows)
    if min(row.data_wait_share for row in found.rows) < (1 - best) / 2:
        return  # windows that differ so much for another reason
    if (
        found.keeps_up
        or max(row.ratio_high or _LIMITED_BY_LOADER * best for row in found.rows)
        >= ENOUGH_SHARE
    ):
        return
    most = max(found.rows, key=lambda row: row.num_workers)
    half = [
        row.ratio_to_cached
        for row in found.rows
        if row.num_workers <= most.num_workers / 2
    ]
    grows = half and not idle and most.ratio_to_cached > _LIMITED_BY_LOADER * max(half)
    limit = "the loader itself is the limit, not its workers"
    more = "more CPU cores, or a cheaper sample, would help" if grows else limit
    yield (
        f"no number of workers is sufficient:"
        f" data loading costs {format_percent(1 - best)} of the throughput; {more}"
    )


def trials_table(trials: Sequence[FinishedTrial]) -> doc.Block:
    """Return the table of all trials."""
    return table_of(
        "Trials",
        trials,
        ("trial", "l", lambda one: one.label),
        ("outcome", "l", lambda one: describe(one.outcome)),
        ("time", "r", lambda one: format_seconds(one.seconds)),
        (
            "detail",
            "l",
            lambda one: (
                "" if isinstance(one.outcome, Measured) else one.outcome.detail[:200]
            ),
        ),
        long=True,
    )
