"""Report sections on memory: the memory breakdown, and throughput by micro-batch with its knee."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from autotune.base import document as doc
from autotune.base.document import bulleted, facts_table, jsonable, paragraph, table_of
from autotune.base.render import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.base.wording import format_bounds, format_number, plural
from autotune.memory.values import (
    ACTIVATIONS,
    Answer,
    PredictedModel,
    ProbeEvidence,
    Share,
    Term,
)
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.follow_up import command, probe_command
from autotune.profiles.sections import global_batch_words
from autotune.profiles.values import Profile
from autotune.report.values import ReportedProfile
from autotune.speed.sections import speed_table
from autotune.trials.values import FinishedTrial
from trainer.config.train_config import TrainConfig

_MOST_PARTS = 7
"""Most parts of a bar; more cannot be distinguished."""
_SMALL_SHARE = 0.001
"""Share of the peak below which terms are summed up."""
_MUCH_SHARE = 0.05
"""Share of the peak lost to fragmentation above which it is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A probed model: its profile, the path of that, and every trial."""

    path: Path
    profile: Profile
    trials: tuple[FinishedTrial, ...]
    previous: Path | None
    """Path to which the previous profile was moved."""

    @property
    def evidence(self) -> ProbeEvidence:
        """Evidence that the probe put into the profile."""
        assert self.profile.evidence.probe is not None
        return self.profile.evidence.probe


def probe_answer(one: ProbedModel) -> dict[str, Any]:
    """Return the JSON of one model: the probe's result, the path of its profile, and every trial."""
    train, budget_bytes = one.profile.train, one.profile.constraints.memory_budget_bytes
    trials = [
        {
            "micro_batch_size": done.trial.config["micro_batch_size"],
            "label": done.label,
            "seconds": round(done.seconds, 3),
            "from_trial_log": done.from_trial_log,
            "outcome": done.outcome,
        }
        for done in one.trials
    ]
    return {
        "model": train.model.name,
        "profile": one.path,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "memory_budget_bytes": budget_bytes,
        "bytes_known": one.profile.fingerprint.bytes_known,
        **jsonable(one.evidence),
        "trials": trials,
    }


def probe_text(probed: list[ProbedModel], data: Path) -> str:
    """Return the answer for people: a line per model, reasons, paths of profiles, and next commands."""
    known = [(one.profile.train, one.evidence) for one in probed]
    found = [
        (train, evidence, evidence.promised(train.micro_batch_size))
        for train, evidence in known
    ]
    table = table_of(
        "",
        found,
        ("model", "l", lambda one: one[0].model.name),
        (
            "parameters",
            "r",
            lambda one: (
                f"{one[1].parameters / 1e6:.1f} M" if one[1].parameters else None
            ),
        ),
        ("max micro-batch", "r", lambda one: str(one[1].feasible_max)),
        (
            "out of memory at",
            "r",
            lambda one: str(one[1].infeasible_min) if one[1].infeasible_min else None,
        ),
        ("micro-batch", "r", lambda one: str(one[0].micro_batch_size)),
        (
            "tokens/s incl. padding",
            "r",
            lambda one: format_count(one[2].padded_tokens_per_s if one[2] else None),
        ),
        ("peak memory", "r", lambda one: format_bytes(one[1].feasible_peak_bytes)),
        (
            "predicted",
            "r",
            lambda one: format_bytes(
                one[1].traced_peak_bytes or one[1].predicted_peak_bytes
            ),
        ),
        ("trials", "r", lambda one: str(one[1].search_trials)),
        ("time", "r", lambda one: format_seconds(one[1].seconds)),
    )
    reasons = [
        (one.profile.train.model.name, (line,))
        for one in probed
        for line in reasons_of(one.profile)
    ]
    old = {
        one.path: f" (previous one: {one.previous})" for one in probed if one.previous
    }
    written = [("profile", (f"{one.path}{old.get(one.path, '')}",)) for one in probed]
    following = [("next", (command("workers", one.path, data=data),)) for one in probed]
    return console_text((table, doc.Pairs(pairs=(*reasons, *written, *following))))


def reasons_of(profile: Profile) -> Iterator[str]:
    """Yield a line each on the reason for the micro-batch size, the split of the global batch, and unknown facts."""
    probe = profile.evidence.probe
    assert probe is not None
    yield probe.choice
    if probe.knee_micro_batch_sizes and probe.curve:
        low, high = min(probe.knee_micro_batch_sizes), max(probe.knee_micro_batch_sizes)
        yield (
            f"throughput levels off {'at' if low == high else f'between {low} and'}"
            f" {plural(high, 'sequence')}"
        )
    yield batch_split_words(profile.train, probe.local_ranks)
    yield (
        "each optimizer step has"
        f" {global_batch_words(profile.constraints.global_batch_tokens)}"
    )
    if probe.infeasible_min is None:
        yield (
            f"more may fit: sizes above {probe.feasible_max} were not tried"
            " (--max-micro-batch-size)"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield (
            "pretended GPU: memory is that of torch's allocator, and throughput was not"
            " measured"
        )
    if probe.not_traced:
        yield f"no memory prediction: {probe.not_traced}"


def batch_split_words(train: TrainConfig, local_ranks: int) -> str:
    """Return the split of the global batch into micro-batches per rank, in words, with its empty sequences."""
    split = split_global_batch(
        train.global_batch_size, train.micro_batch_size, local_ranks
    )
    words = (
        f"global batch of {plural(train.global_batch_size, 'sequence')}: micro-batch"
        f" size {split.micro_batch_size}"
    )
    words += f" x {plural(split.gradient_accumulation_steps, 'accumulation step')}"
    words += f" x {local_ranks} ranks" if local_ranks > 1 else ""
    if split.empty_sequences:
        without = " or ".join(map(str, split.without_empty))
        words += (
            f"; {plural(split.empty_sequences, 'sequence')} empty, none with a global batch"
            f" of {without}"
        )
    return words


def memory_section(one: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on memory: predicted by term, measured in total, and the budget."""
    probe = one.profile.evidence.probe
    if probe is None:
        return (
            doc.Missing(
                subject="Largest micro-batch",
                commands=(probe_command(one.profile, one.path),),
            ),
        )
    constraints, train, known = (
        one.profile.constraints,
        one.profile.train,
        one.profile.fingerprint.bytes_known,
    )
    traced = (
        format_bytes(probe.traced_peak_bytes)
        if probe.traced_peak_bytes is not None
        else "not predicted"
    )
    rows: list[Row] = [
        ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)],
        [
            "largest micro-batch, verified",
            f"{probe.feasible_max} sequences of {train.seq_length_tokens} tokens",
        ],
        [
            "smallest micro-batch out of memory",
            str(probe.infeasible_min) if probe.infeasible_min else "none tried",
        ],
        [
            f"peak memory of the largest, {known}",
            format_bytes(probe.feasible_peak_bytes),
        ],
        ["peak memory, predicted before any trial", traced],
        [
            "peak memory, predicted with smaller trials",
            format_bytes(probe.predicted_peak_bytes),
        ],
        [
            "largest micro-batch, predicted before any trial",
            format_count(probe.traced_micro_batch_size),
        ],
        ["parameters", format_count(probe.parameters)],
        ["ranks training together", str(probe.local_ranks)],
        [
            "gradient accumulation",
            "yes" if probe.gradient_accumulation_steps > 1 else "no",
        ],
        ["layout", train.layout],
        [
            "non-padding tokens per sequence, average",
            f"{probe.mean_tokens_per_sequence:.1f}",
        ],
        ["trials until both sizes were verified", str(probe.search_trials)],
        ["time of all trials", format_seconds(probe.seconds)],
        ["headroom", format_share(constraints.headroom_share)],
        ["micro-batch size in use", f"{train.micro_batch_size}: {probe.choice}"],
    ]
    chart = (
        (_traced_breakdown(probe, constraints.memory_budget_bytes, known),)
        if probe.traced_terms_bytes
        else ()
    )
    return (facts_table("Largest micro-batch", rows), *chart)


def _traced_breakdown(probe: ProbeEvidence, budget: int, known: str) -> doc.Chart:
    terms, measured = probe.traced_terms_bytes, probe.feasible_peak_bytes
    whole, parts = sum(terms.values()), _parts(terms)
    sizes = sorted(terms.items(), key=lambda item: -item[1])
    sizes += [
        ("all terms, predicted", whole),
        (f"peak, {known}", measured),
        ("memory budget per rank", budget),
    ]
    predicted = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return doc.Chart(
        title=f"Memory breakdown at {plural(probe.feasible_max, 'sequence')}",
        description=(
            f"Predicted {format_bytes(whole)}: {predicted}. {known.capitalize()}"
            f" {format_bytes(measured)}. Budget {format_bytes(budget)}."
        ),
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="memory per rank", unit="bytes"),
            stacks=(
                doc.Stack(label="predicted", parts=parts),
                doc.Stack(label=known, parts=((f"peak, {known}", float(measured)),)),
            ),
            rules=(doc.ReferenceLine(value=float(budget), label="memory budget"),),
        ),
        table=table_of(
            "Memory by term",
            sizes,
            ("term", "l", lambda one: one[0]),
            ("size", "r", lambda one: format_bytes(one[1])),
            (
                "share of predicted",
                "r",
                lambda one: format_share(one[1] / whole) if whole else None,
            ),
        ),
    )


def _parts(terms: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    """Return the terms for the chart: all activations as one, and the smallest together as ``other``."""
    joined: dict[str, float] = {}
    for term, size in terms.items():
        name = ACTIVATIONS if term.startswith(ACTIVATIONS) else term
        joined[name] = joined.get(name, 0.0) + max(0, size)
    ranked = sorted(joined.items(), key=lambda item: -item[1])
    if len(ranked) <= _MOST_PARTS:
        return tuple(ranked)
    return (
        *ranked[: _MOST_PARTS - 1],
        ("other", sum(size for _, size in ranked[_MOST_PARTS - 1 :])),
    )


def curve_section(one: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on throughput by micro-batch size, with its knee and the size in use."""
    probe, again = one.profile.evidence.probe, (probe_command(one.profile, one.path),)
    missing = doc.Missing(subject="Throughput by micro-batch size", commands=again)
    if probe is None:
        return (missing,)
    rows = one.profile.train.micro_batch_size
    used = bulleted([f"micro-batch size in use: {rows}", *reasons_of(one.profile)])
    if not probe.curve:
        return (used, missing)
    best = max(probe.curve, key=lambda point: point.padded_tokens_per_s)
    at = [
        f"{format_number(one.padded_tokens_per_s)} at {one.micro_batch_size}"
        for one in (*probe.curve, best)
    ]
    points = tuple(
        doc.Point(
            x=point.micro_batch_size,
            y=point.padded_tokens_per_s,
            low=point.padded_tokens_per_s_low,
            high=point.padded_tokens_per_s_high,
        )
        for point in probe.curve
    )
    lines = [doc.Line(name="measured, 95 % interval", points=points, colour=0)]
    if dots := tuple(
        doc.Point(x=point.x, y=point.y) for point in points if point.x == rows
    ):
        lines.append(doc.Line(name="used", points=dots, kind="dots", colour=5))
    knee = probe.knee_micro_batch_sizes
    chart = doc.Chart(
        title="Throughput by micro-batch size",
        description=(
            f"Tokens/s including padding: {at[0]}, {at[-2]}; the highest is {at[-1]}."
            " All sequences are full."
        ),
        drawing=doc.LineChart(
            x=doc.Axis(
                label="micro-batch size (sequences)",
                unit="count",
                log=2,
                ticks=tuple(one.x for one in points),
            ),
            y=doc.Axis(label="tokens/s including padding", unit="count", low=0),
            lines=tuple(lines),
            shade=(
                doc.Shade(start=knee[0], end=knee[1], label="throughput levels off")
                if len(set(knee)) == 2
                else None
            ),
        ),
        table=table_of(
            "Throughput by micro-batch size (full sequences)",
            probe.curve,
            ("micro-batch size", "r", lambda point: str(point.micro_batch_size)),
            (
                "tokens/s incl. padding",
                "r",
                lambda point: format_number(point.padded_tokens_per_s),
            ),
            (
                "95 % interval",
                "r",
                lambda point: format_bounds(
                    point.padded_rate.low, point.padded_rate.high, format_number
                ),
            ),
            (
                "share of best",
                "r",
                lambda point: format_share(
                    point.padded_tokens_per_s / best.padded_tokens_per_s
                ),
            ),
            ("step time (median)", "r", lambda point: format_seconds(point.step_s)),
            ("timed steps", "r", lambda point: str(point.timed_steps)),
        ),
    )
    return (chart, used)


def estimate_text(answer: Answer, next_command: str) -> str:
    """Return the answer for people, then ``next_command``.

    Empty without any predicted model or alternative.
    """
    if not (answer.models or answer.what_if):
        return ""
    reserve = (
        f" ({format_bytes(answer.reserve_bytes)} of its memory stay free)"
        if answer.reserve_bytes
        else ""
    )
    blocks: list[doc.Block] = [
        paragraph(f"Predicted for {answer.target}{reserve}; nothing was measured.")
    ]
    if answer.models:
        blocks += [
            _summary(answer.models),
            *(block for one in answer.models for block in _one(one)),
        ]
    if answer.what_if:
        settings = (
            "model",
            "precision",
            "attention",
            "activation_checkpointing",
            "mlm_head",
            "layout",
        )
        table = table_of(
            "Alternatives (predicted largest micro-batch)",
            answer.what_if,
            *((name, "l", itemgetter(name)) for name in settings),
            (
                "max micro-batch",
                "r",
                lambda one: " ".join(
                    str(part) for part in (one["micro_batch_size"], one["note"]) if part
                ),
            ),
            (
                "non-padding tokens",
                "r",
                lambda one: format_count(one["non_padding_tokens"]),
            ),
        )
        blocks.append(table)
        if any(one["attention"] == "varlen" for one in answer.what_if):
            blocks.append(
                paragraph(
                    "varlen requires attention dropout 0, which changes the recipe of"
                    " models that use it."
                )
            )
    blocks += (
        [paragraph(f"next: measure it on that machine: {next_command}")]
        if answer.models
        else []
    )
    return console_text(blocks)


def shares_table(shares: Sequence[Share], caption: str = "") -> doc.Table:
    """Return a table of one GPU's memory under each way of sharing the model."""
    formulas = any(not one.trains_here for one in shares)
    return table_of(
        caption,
        shares,
        (
            f"per rank{' (* formula)' if formulas else ''}",
            "l",
            lambda one: one.name + " *" * (not one.trains_here),
        ),
        (
            "state",
            "r",
            lambda one: format_bytes(one.held.state_bytes + one.held.gathered_bytes),
        ),
        (
            "activations",
            "r",
            lambda one: format_bytes(
                one.held.activations_bytes + one.held.head_and_loss_bytes
            ),
        ),
        (
            "other",
            "r",
            lambda one: format_bytes(
                one.held.temporaries_bytes + one.held.non_pytorch_bytes
            ),
        ),
        ("total", "r", lambda one: format_bytes(one.total_bytes)),
        ("fits", "l", lambda one: "yes" if one.fits else "no"),
    )


def _summary(predicted: Sequence[PredictedModel]) -> doc.Table:
    return table_of(
        "",
        predicted,
        ("model", "l", lambda one: one.model),
        ("parameters", "r", lambda one: f"{one.parameters / 1e6:.1f} M"),
        (
            "max micro-batch",
            "r",
            lambda one: f"{'at least ' if one.limited else ''}{one.micro_batch_size}",
        ),
        (
            "range",
            "r",
            lambda one: (
                None
                if one.limited
                else f"{one.micro_batch_size_low} to {one.micro_batch_size_high}"
            ),
        ),
        (
            "tokens incl. padding",
            "r",
            lambda one: format_count(
                one.micro_batch_size * one.config.seq_length_tokens
            ),
        ),
        ("non-padding tokens", "r", lambda one: format_count(one.non_padding_tokens)),
        ("samples", "r", lambda one: format_count(one.samples)),
        ("peak memory", "r", lambda one: format_bytes(one.breakdown.peak_bytes)),
        ("per sequence", "r", lambda one: format_bytes(one.bytes_per_sequence)),
        (
            "tokens/s",
            "r",
            lambda one: format_count(
                one.speed.padded_tokens_per_s.value if one.speed else None
            ),
        ),
        (
            "MFU",
            "r",
            lambda one: (
                format_share(one.speed.mfu.value)
                if one.speed and one.speed.mfu
                else None
            ),
        ),
    )


def _one(one: PredictedModel) -> Iterator[doc.Block]:
    config = one.config
    yield paragraph(
        f"{config.model.name}: {config.layout} sequences of {config.seq_length_tokens}"
        f" tokens, {config.precision}, {one.attention} attention"
        f" ({one.attention_reason}), activation checkpointing"
        f" {config.activation_checkpointing}, {config.mlm_head} MLM head, budget"
        f" {format_bytes(one.budget_bytes)}"
    )
    yield _breakdown(one)
    lost = one.breakdown.terms_bytes.get(Term.ROUNDING, 0)
    if lost > _MUCH_SHARE * one.breakdown.peak_bytes:
        yield paragraph(f"{format_bytes(lost)} are lost to fragmentation and rounding")
    unknown = (
        "tokens/s not predicted: measure the constants of that machine with autotune"
        " doctor --measure"
    )
    yield (
        paragraph(unknown)
        if one.speed is None
        else speed_table(one.speed, one.micro_batch_size)
    )
    if one.shares:
        yield shares_table(
            one.shares, "Memory when GPUs share the model, at the same micro-batch size"
        )


def _breakdown(one: PredictedModel) -> doc.Table:
    breakdown = one.breakdown
    large = {
        term: size
        for term, size in breakdown.terms_bytes.items()
        if size >= _SMALL_SHARE * breakdown.peak_bytes
    }
    sizes: list[tuple[str, int]] = sorted(large.items(), key=lambda item: -item[1])
    rest = breakdown.peak_bytes - sum(large.values())
    sizes += [("other", rest)] if rest else []
    return table_of(
        "",
        [*sizes, ("peak", breakdown.peak_bytes)],
        (
            f"memory at micro-batch size {breakdown.micro_batch_size}",
            "l",
            lambda item: item[0],
        ),
        ("bytes", "r", lambda item: format_bytes(item[1])),
        ("share", "r", lambda item: f"{item[1] / breakdown.peak_bytes:.1%}"),
    )
