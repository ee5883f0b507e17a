"""An estimate as text: what is predicted to fit, the ledger of where the memory goes, what if."""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.allocations import Term
from autotune.core.units import format_bytes, format_count
from autotune.decide.memory import Ledger
from autotune.decide.prediction import Answer, PredictedModel
from autotune.decide.sharding import Share
from autotune.show.tables import text_table

_SMALL_SHARE = 0.001
"""Terms below this are summed up."""
_MUCH_SHARE = 0.05
"""Of the peak, lost between blocks: worth a word."""


def estimate_text(answer: Answer, next_command: str) -> str:
    """Return the answer for people; empty if every model was refused and nothing else was asked.

    Args:
        answer: What was predicted.
        next_command: Measures it.
    """
    parts = []
    if answer.models:
        parts.append(_summary(answer.models))
        parts += [_one(one) for one in answer.models]
    if answer.what_if:
        parts.append("What if (rows that are predicted to fit)\n" + _what_if_table(answer.what_if))
        if any(one["attention"] == "varlen" for one in answer.what_if):
            parts.append(
                "varlen lines leave out the dropout of attention weights: where a model has it, the recipe changes"
            )
    if answer.models:
        parts.append(f"next: measure it there: {next_command}")
    reserve = f", of which {format_bytes(answer.reserve_bytes)} are left free" if answer.reserve_bytes else ""
    head = f"Predicted for {answer.target}{reserve}; nothing was measured."
    return "\n\n".join([head, *parts]) if parts else ""


def shares_table(shares: Sequence[Share]) -> str:
    """Return a table of what one GPU holds under each way of sharing the model."""
    formulas = any(not one.trains_here for one in shares)
    headers = (f"one rank{' (* a formula)' if formulas else ''}", "state", "activations", "other", "all of it", "fits")
    rows: list[list[str | None]] = [
        [
            one.name + ("" if one.trains_here else " *"),
            format_bytes(one.held.state_bytes + one.held.gathered_bytes),
            format_bytes(one.held.activations_bytes + one.held.head_and_loss_bytes),
            format_bytes(one.held.temporaries_bytes + one.held.outside_bytes),
            format_bytes(one.total_bytes),
            None if one.fits is None else "yes" if one.fits else "no",
        ]
        for one in shares
    ]
    return text_table(headers, rows, align="lrrrrl")


def _summary(predicted: Sequence[PredictedModel]) -> str:
    headers = ("model", "parameters", "rows", "range", "slot tokens", "real tokens", "samples", "peak", "one more row")
    rows: list[list[str | None]] = [
        [
            one.model,
            f"{one.parameters / 1e6:.1f} M",
            f"at least {one.rows}" if one.limited else str(one.rows),
            None if one.limited else f"{one.rows_low} to {one.rows_high}",
            format_count(one.rows * one.config.seq_length_tokens),
            format_count(one.real_tokens),
            format_count(one.samples),
            format_bytes(one.ledger.peak_bytes),
            format_bytes(one.per_row_bytes),
        ]
        for one in predicted
    ]
    return text_table(headers, rows, align="lrrrrrrrr")


def _one(one: PredictedModel) -> str:
    config = one.config
    said = (
        f"{config.model.name}: {config.layout} rows of {config.seq_length_tokens}, {config.precision}, "
        f"{one.attention} attention ({one.attention_reason}), checkpointing {config.checkpointing}, "
        f"{config.head} head, budget {format_bytes(one.budget_bytes)}"
    )
    parts = [said, _ledger_table(one.ledger)]
    lost = one.ledger.terms_bytes.get(Term.ROUNDING, 0)
    if lost > _MUCH_SHARE * one.ledger.peak_bytes:
        parts.append(f"{format_bytes(lost)} are free blocks that no request fits, and rounding")
    if one.shares:
        parts.append(f"Shared among GPUs, one micro-batch of the same rows\n{shares_table(one.shares)}")
    return "\n".join(parts)


def _ledger_table(ledger: Ledger) -> str:
    large = {term: size for term, size in ledger.terms_bytes.items() if size >= _SMALL_SHARE * ledger.peak_bytes}
    rest = ledger.peak_bytes - sum(large.values())
    rows: list[list[str | None]] = [
        [term, format_bytes(size), f"{size / ledger.peak_bytes:.1%}"]
        for term, size in sorted(large.items(), key=lambda item: -item[1])
    ]
    if rest:
        rows.append(["everything else", format_bytes(rest), f"{rest / ledger.peak_bytes:.1%}"])
    rows.append(["at the peak", format_bytes(ledger.peak_bytes), "100.0%"])
    return text_table((f"term at {ledger.rows} rows", "bytes", "share"), rows, align="lrr")


def _what_if_table(what_if: Sequence[Mapping[str, Any]]) -> str:
    settings = ("model", "precision", "attention", "checkpointing", "head", "layout")
    rows: list[list[str | None]] = [
        [
            *(one[name] for name in settings),
            one["note"] if one["rows"] is None else f"{one['rows']} {one['note']}".rstrip(),
            format_count(one["real_tokens"]),
        ]
        for one in what_if
    ]
    return text_table((*settings, "rows", "real tokens"), rows, align="llllllrr")
