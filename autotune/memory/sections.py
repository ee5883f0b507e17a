"""Answers and report sections on memory.

These are the memory breakdown, throughput by micro-batch size with its knee, and the
predictions of ``autotune estimate``.
"""

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
from autotune.memory.decide.overheads import MEASURED_TORCH, unconfirmed_share
from autotune.memory.values import (
    ACTIVATIONS,
    LOWER_BOUND,
    Answer,
    CurvePoint,
    MemoryBreakdown,
    PredictedModel,
    ProbeEvidence,
    Share,
    Term,
)
from autotune.profiles.decide.batch_split import SPLIT_FACTORS, split_global_batch
from autotune.profiles.decide.follow_up import command, probe_command
from autotune.profiles.sections import global_batch_words
from autotune.profiles.values import Profile
from autotune.report.values import ReportedProfile
from autotune.speed.sections import speed_table
from autotune.trials.values import FinishedTrial
from trainer.config.train_config import TrainConfig

_MAX_PARTS = 7
"""Most parts of a bar; more cannot be distinguished."""
_SMALL_SHARE = 0.001
"""Share of the peak below which terms are summed up."""
_FRAGMENTED_SHARE = 0.05
"""Share of the peak lost to fragmentation above which it is reported."""
_SETTINGS = (
    "model",
    "precision",
    "attention",
    "activation_checkpointing",
    "mlm_head",
    "layout",
)
"""Columns of the table of alternatives before its figures."""


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


def probe_answer(probed: ProbedModel) -> dict[str, Any]:
    """Return the JSON of one model.

    It has the probe's result, the path of its profile, and every trial.
    """
    profile = probed.profile
    trials = [
        {
            "micro_batch_size": finished.trial.config["micro_batch_size"],
            "label": finished.label,
            "seconds": round(finished.seconds, 3),
            "from_trial_log": finished.from_trial_log,
            "outcome": finished.outcome,
        }
        for finished in probed.trials
    ]
    return {
        "model": profile.train.model.name,
        "profile": probed.path,
        "micro_batch_size": profile.train.micro_batch_size,
        "global_batch_size": profile.train.global_batch_size,
        "memory_budget_bytes": profile.constraints.memory_budget_bytes,
        "bytes_known": profile.fingerprint.bytes_known,
        **jsonable(probed.evidence),
        "trials": trials,
    }


def probe_text(probed: list[ProbedModel], data: Path) -> str:
    """Return the answer for people.

    It has a line per model, reasons, paths of profiles, and next commands.
    """
    table = table_of(
        "",
        probed,
        ("model", "l", lambda model: model.profile.train.model.name),
        ("parameters", "r", lambda model: _millions(model.evidence.parameters)),
        ("max micro-batch", "r", _largest),
        (
            "out of memory at",
            "r",
            lambda model: _number_or_none(model.evidence.infeasible_min),
        ),
        ("micro-batch", "r", lambda model: str(model.profile.train.micro_batch_size)),
        ("tokens/s incl. padding", "r", _promised_rate),
        (
            "peak memory",
            "r",
            lambda model: format_bytes(model.evidence.feasible_peak_bytes),
        ),
        ("predicted", "r", _predicted_peak),
        ("trials", "r", lambda model: str(model.evidence.search_trials)),
        ("time", "r", lambda model: format_seconds(model.evidence.seconds)),
    )
    reasons: list[tuple[str, doc.Words]] = []
    written: list[tuple[str, doc.Words]] = []
    following: list[tuple[str, doc.Words]] = []
    for model in probed:
        name = model.profile.train.model.name
        reasons += [(name, (reason,)) for reason in reasons_of(model.profile)]
        previous = f" (previous one: {model.previous})" if model.previous else ""
        written.append(("profile", (f"{model.path}{previous}",)))
        following.append(("next", (command("workers", model.path, data=data),)))
    return console_text((table, doc.Pairs(pairs=(*reasons, *written, *following))))


def _millions(parameters: int | None) -> str | None:
    return f"{parameters / 1e6:.1f} M" if parameters else None


def _largest(probed: ProbedModel) -> str:
    sign = "≥ " if probed.evidence.is_lower_bound else ""
    return f"{sign}{probed.evidence.feasible_max}"


def _number_or_none(number: int | None) -> str | None:
    return str(number) if number else None


def _promised_rate(probed: ProbedModel) -> str | None:
    promised = probed.evidence.expected_throughput(
        probed.profile.train.micro_batch_size
    )
    return format_count(promised.padded_tokens_per_s if promised else None)


def _predicted_peak(probed: ProbedModel) -> str | None:
    evidence = probed.evidence
    return format_bytes(evidence.traced_peak_bytes or evidence.predicted_peak_bytes)


def reasons_of(profile: Profile) -> Iterator[str]:
    """Yield a line on each reason and on each unknown fact of a probe.

    The reasons are for the micro-batch size and the split of the global batch.
    """
    probe = profile.evidence.probe
    assert probe is not None
    yield probe.choice
    if probe.knee_micro_batch_sizes and probe.curve:
        low, high = min(probe.knee_micro_batch_sizes), max(probe.knee_micro_batch_sizes)
        where = "at" if low == high else f"between {low} and"
        yield f"throughput levels off {where} {plural(high, 'sequence')}"
    yield batch_split_words(profile.train, probe.local_ranks)
    yield (
        "each optimizer step has"
        f" {global_batch_words(profile.constraints.global_batch_tokens)}"
    )
    if probe.is_lower_bound:
        yield (
            f"{LOWER_BOUND}: time ended before the limit was verified; for the largest"
            " size, run the same command with a longer --time-limit"
        )
    elif probe.infeasible_min is None:
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
    """Return the split of the global batch in words, with its empty sequences."""
    split = split_global_batch(
        train.global_batch_size, train.micro_batch_size, local_ranks
    )
    words = f"global batch of {split.words(local_ranks)} ({SPLIT_FACTORS})"
    if split.empty_sequences:
        without_empty = " or ".join(map(str, split.without_empty))
        words += (
            f"; {plural(split.empty_sequences, 'sequence')} empty, none with a global"
            f" batch of {without_empty}"
        )
    return words


def memory_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on memory: predicted, measured, and the budget."""
    profile = reported.profile
    probe = profile.evidence.probe
    if probe is None:
        return (
            doc.Missing(
                subject="Largest micro-batch",
                commands=(probe_command(profile, reported.path),),
            ),
        )
    constraints, train = profile.constraints, profile.train
    # The source of measured bytes, such as NVML.
    bytes_known = profile.fingerprint.bytes_known
    traced_peak: str | None = "not predicted"
    if probe.traced_peak_bytes is not None:
        traced_peak = format_bytes(probe.traced_peak_bytes)
    rows: list[Row] = [
        ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)],
        [
            (
                f"largest micro-batch that ran: {LOWER_BOUND}"
                if probe.is_lower_bound
                else "largest micro-batch, verified"
            ),
            f"{probe.feasible_max} sequences of {train.seq_length_tokens} tokens",
        ],
        [
            "smallest micro-batch out of memory",
            str(probe.infeasible_min) if probe.infeasible_min else "none tried",
        ],
        [
            f"peak memory of the largest, {bytes_known}",
            format_bytes(probe.feasible_peak_bytes),
        ],
        ["peak memory, predicted before any trial", traced_peak],
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
    table = facts_table("Largest micro-batch", rows)
    if not probe.traced_terms_bytes:
        return (table,)
    budget_bytes = constraints.memory_budget_bytes
    return (table, _traced_breakdown(probe, budget_bytes, bytes_known))


def _traced_breakdown(
    probe: ProbeEvidence, budget_bytes: int, bytes_known: str
) -> doc.Chart:
    """Return the chart of predicted memory by term, beside the measured peak."""
    terms, measured_bytes = probe.traced_terms_bytes, probe.feasible_peak_bytes
    predicted_bytes = sum(terms.values())
    parts = _parts(terms)
    sizes = sorted(terms.items(), key=lambda item: -item[1])
    sizes += [
        ("all terms, predicted", predicted_bytes),
        (f"peak, {bytes_known}", measured_bytes),
        ("memory budget per rank", budget_bytes),
    ]

    def share_of_predicted(item: tuple[str, int]) -> str | None:
        _, size_bytes = item
        return format_share(size_bytes / predicted_bytes) if predicted_bytes else None

    by_term = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    measured = doc.Stack(
        label=bytes_known, parts=((f"peak, {bytes_known}", float(measured_bytes)),)
    )
    budget_line = doc.ReferenceLine(value=float(budget_bytes), label="memory budget")
    return doc.Chart(
        title=f"Memory breakdown at {plural(probe.feasible_max, 'sequence')}",
        description=(
            f"Predicted {format_bytes(predicted_bytes)}: {by_term}."
            f" {bytes_known.capitalize()} {format_bytes(measured_bytes)}."
            f" Budget {format_bytes(budget_bytes)}."
        ),
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="memory per rank", unit="bytes"),
            stacks=(doc.Stack(label="predicted", parts=parts), measured),
            rules=(budget_line,),
        ),
        table=table_of(
            "Memory by term",
            sizes,
            ("term", "l", _term),
            ("size", "r", _size),
            ("share of predicted", "r", share_of_predicted),
        ),
    )


def _term(item: tuple[str, int]) -> str:
    term, _ = item
    return term


def _size(item: tuple[str, int]) -> str | None:
    _, size_bytes = item
    return format_bytes(size_bytes)


def _parts(terms: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    """Return the terms for the chart, the largest first.

    All activations are one part, and the smallest parts are together ``other``.
    """
    joined: dict[str, float] = {}
    for term, size in terms.items():
        name = ACTIVATIONS if term.startswith(ACTIVATIONS) else term
        joined[name] = joined.get(name, 0.0) + max(0, size)
    ranked = sorted(joined.items(), key=lambda item: -item[1])
    if len(ranked) <= _MAX_PARTS:
        return tuple(ranked)
    shown, others = ranked[: _MAX_PARTS - 1], ranked[_MAX_PARTS - 1 :]
    return (*shown, ("other", sum(size for _, size in others)))


def curve_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on throughput by micro-batch size, and the size in use."""
    profile = reported.profile
    probe = profile.evidence.probe
    missing = doc.Missing(
        subject="Throughput by micro-batch size",
        commands=(probe_command(profile, reported.path),),
    )
    if probe is None:
        return (missing,)
    used_size = profile.train.micro_batch_size
    used = bulleted([f"micro-batch size in use: {used_size}", *reasons_of(profile)])
    if not probe.curve:
        return (used, missing)
    return (_curve_chart(probe, used_size), used)


def _curve_chart(probe: ProbeEvidence, used_size: int) -> doc.Chart:
    """Return the chart of the throughput curve, with its knee and the size in use."""
    best = max(probe.curve, key=lambda point: point.padded_tokens_per_s)
    first, last = probe.curve[0], probe.curve[-1]
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
    used_points = tuple(
        doc.Point(x=point.x, y=point.y) for point in points if point.x == used_size
    )
    if used_points:
        lines.append(doc.Line(name="used", points=used_points, kind="dots", colour=5))
    knee = probe.knee_micro_batch_sizes
    shade = None
    if len(set(knee)) == 2:
        shade = doc.Shade(start=knee[0], end=knee[1], label="throughput levels off")
    return doc.Chart(
        title="Throughput by micro-batch size",
        description=(
            f"Tokens/s including padding: {_rate_words(first)}, {_rate_words(last)};"
            f" the highest is {_rate_words(best)}. All sequences are full."
        ),
        drawing=doc.LineChart(
            x=doc.Axis(
                label="micro-batch size (sequences)",
                unit="count",
                log=2,
                ticks=tuple(point.x for point in points),
            ),
            y=doc.Axis(label="tokens/s including padding", unit="count", low=0),
            lines=tuple(lines),
            shade=shade,
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


def _rate_words(point: CurvePoint) -> str:
    return f"{format_number(point.padded_tokens_per_s)} at {point.micro_batch_size}"


def estimate_text(answer: Answer, next_command: str) -> str:
    """Return the answer for people, then ``next_command``.

    Empty without any predicted model or alternative.
    """
    if not (answer.models or answer.what_if):
        return ""
    reserve = ""
    if answer.reserve_bytes:
        reserve = f" ({format_bytes(answer.reserve_bytes)} of its memory stay free)"
    blocks: list[doc.Block] = [
        paragraph(f"Predicted for {answer.target}{reserve}; nothing was measured.")
    ]
    if answer.models:
        blocks.append(paragraph(_traced_words(answer.models)))
        blocks.append(_summary(answer.models))
        for model in answer.models:
            blocks += _model_blocks(model)
    if answer.what_if:
        blocks.append(_alternatives_table(answer.what_if))
        if any(setting["attention"] == "varlen" for setting in answer.what_if):
            blocks.append(
                paragraph(
                    "varlen requires attention dropout 0, which changes the recipe of"
                    " models that use it."
                )
            )
    if answer.models:
        blocks.append(paragraph(f"next: measure it on that machine: {next_command}"))
    return console_text(blocks)


def _traced_words(models: Sequence[PredictedModel]) -> str:
    """Return which torch the predictions are for."""
    words = f"Traced with torch {models[0].torch}; other versions may keep more or less"
    if any(
        unconfirmed_share(
            model.config.device,
            model.torch,
            is_compiled=model.config.compile is not False,
        )
        for model in models
    ):
        words += (
            f". Measured on a GPU was torch {MEASURED_TORCH}, which needs more: the"
            " lower end of the range is for it"
        )
    return f"{words}."


def _alternatives_table(what_if: Sequence[Mapping[str, Any]]) -> doc.Table:
    return table_of(
        "Alternatives (predicted largest micro-batch)",
        what_if,
        *((name, "l", itemgetter(name)) for name in _SETTINGS),
        ("max micro-batch", "r", _largest_words),
        (
            "non-padding tokens",
            "r",
            lambda setting: format_count(setting["non_padding_tokens"]),
        ),
    )


def _largest_words(setting: Mapping[str, Any]) -> str:
    """Return the largest micro-batch of an alternative, with its note."""
    parts = (setting["micro_batch_size"], setting["note"])
    return " ".join(str(part) for part in parts if part)


def shares_table(shares: Sequence[Share], caption: str = "") -> doc.Table:
    """Return a table of one GPU's memory under each way of sharing the model."""
    any_formula = any(not share.trains_here for share in shares)
    return table_of(
        caption,
        shares,
        (
            f"per rank{' (* formula)' if any_formula else ''}",
            "l",
            lambda share: share.name if share.trains_here else f"{share.name} *",
        ),
        (
            "state",
            "r",
            lambda share: format_bytes(
                share.held.state_bytes + share.held.gathered_bytes
            ),
        ),
        (
            "activations",
            "r",
            lambda share: format_bytes(
                share.held.activations_bytes + share.held.head_and_loss_bytes
            ),
        ),
        (
            "other",
            "r",
            lambda share: format_bytes(
                share.held.temporaries_bytes + share.held.non_pytorch_bytes
            ),
        ),
        ("total", "r", lambda share: format_bytes(share.total_bytes)),
        ("fits", "l", lambda share: "yes" if share.fits else "no"),
    )


def _summary(predicted: Sequence[PredictedModel]) -> doc.Table:
    return table_of(
        "",
        predicted,
        ("model", "l", lambda model: model.model),
        ("parameters", "r", lambda model: f"{model.parameters / 1e6:.1f} M"),
        (
            "max micro-batch",
            "r",
            lambda model: (
                f"{'at least ' if model.limited else ''}{model.micro_batch_size}"
            ),
        ),
        ("range", "r", _size_range),
        (
            "tokens incl. padding",
            "r",
            lambda model: format_count(
                model.micro_batch_size * model.config.seq_length_tokens
            ),
        ),
        (
            "non-padding tokens",
            "r",
            lambda model: format_count(model.non_padding_tokens),
        ),
        ("samples", "r", lambda model: format_count(model.samples)),
        ("peak memory", "r", lambda model: format_bytes(model.breakdown.peak_bytes)),
        ("per sequence", "r", lambda model: format_bytes(model.bytes_per_sequence)),
        ("tokens/s", "r", _predicted_rate),
        ("MFU", "r", _predicted_mfu),
    )


def _size_range(model: PredictedModel) -> str | None:
    if model.limited:
        return None
    return f"{model.micro_batch_size_low} to {model.micro_batch_size_high}"


def _predicted_rate(model: PredictedModel) -> str | None:
    speed = model.speed
    return format_count(speed.padded_tokens_per_s.value if speed else None)


def _predicted_mfu(model: PredictedModel) -> str | None:
    if model.speed is None or model.speed.mfu is None:
        return None
    return format_share(model.speed.mfu.value)


def _model_blocks(model: PredictedModel) -> Iterator[doc.Block]:
    """Yield the settings of one model, its memory by term, speed and shares."""
    config = model.config
    yield paragraph(
        f"{config.model.name}: {config.layout} sequences of {config.seq_length_tokens}"
        f" tokens, {config.precision}, {model.attention} attention"
        f" ({model.attention_reason}), activation checkpointing"
        f" {config.activation_checkpointing}, {config.mlm_head} MLM head, budget"
        f" {format_bytes(model.budget_bytes)}"
    )
    yield _breakdown_table(model.breakdown)
    lost_bytes = model.breakdown.terms_bytes.get(Term.ROUNDING, 0)
    if lost_bytes > _FRAGMENTED_SHARE * model.breakdown.peak_bytes:
        lost = format_bytes(lost_bytes)
        yield paragraph(f"{lost} are lost to fragmentation and rounding")
    if model.speed is None:
        yield paragraph(
            "tokens/s not predicted: measure the constants of that machine with"
            " autotune doctor --measure"
        )
    else:
        yield speed_table(model.speed, model.micro_batch_size)
    if model.shares:
        yield shares_table(
            model.shares,
            "Memory when GPUs share the model, at the same micro-batch size",
        )


def _breakdown_table(breakdown: MemoryBreakdown) -> doc.Table:
    """Return the memory by term, the largest first, and small terms together."""
    large = {
        term: size
        for term, size in breakdown.terms_bytes.items()
        if size >= _SMALL_SHARE * breakdown.peak_bytes
    }
    sizes: list[tuple[str, int]] = sorted(large.items(), key=lambda item: -item[1])
    other_bytes = breakdown.peak_bytes - sum(large.values())
    if other_bytes:
        sizes.append(("other", other_bytes))
    sizes.append(("peak", breakdown.peak_bytes))

    def share_of_peak(item: tuple[str, int]) -> str:
        _, size_bytes = item
        return f"{size_bytes / breakdown.peak_bytes:.1%}"

    return table_of(
        "",
        sizes,
        (f"memory at micro-batch size {breakdown.micro_batch_size}", "l", _term),
        ("bytes", "r", _size),
        ("share", "r", share_of_peak),
    )
