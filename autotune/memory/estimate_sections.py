"""An estimate: what is predicted to fit, where the memory goes, and what if."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from autotune.base.document import Block, Paragraph, Table, table_of
from autotune.base.render import console_text
from autotune.base.units import format_bytes, format_count
from autotune.memory.decide.memory_model import MemoryBreakdown
from autotune.memory.decide.prediction import Answer, PredictedModel
from autotune.memory.decide.sharding import Share
from autotune.memory.values import Term

_SMALL_SHARE = 0.001
"""Terms below this are summed up."""
_MUCH_SHARE = 0.05
"""Of the peak, lost between blocks: worth a word."""


def estimate_text(answer: Answer, next_command: str) -> str:
    """Return the answer for people, then ``next_command``; empty if all models were refused and no more was asked."""
    if not (answer.models or answer.what_if):
        return ""
    reserve = f", of which {format_bytes(answer.reserve_bytes)} are left free" if answer.reserve_bytes else ""
    blocks = [_line(f"Predicted for {answer.target}{reserve}; nothing was measured.")]
    if answer.models:
        blocks += [_summary(answer.models), *(block for one in answer.models for block in _one(one))]
    if answer.what_if:
        blocks.append(_what_if_table(answer.what_if))
        if any(one["attention"] == "varlen" for one in answer.what_if):
            blocks.append(
                _line(
                    "varlen lines leave out the dropout of attention weights: where a model has it, the recipe changes"
                )
            )
    blocks += [_line(f"next: measure it there: {next_command}")] if answer.models else []
    return console_text(blocks)


def shares_table(shares: Sequence[Share], caption: str = "") -> Table:
    """Return a table of what one GPU holds under each way of sharing the model."""
    formulas = any(not one.trains_here for one in shares)
    return table_of(
        caption, shares,
        (f"one rank{' (* a formula)' if formulas else ''}", "l", lambda one: one.name + " *" * (not one.trains_here)),
        ("state", "r", lambda one: format_bytes(one.held.state_bytes + one.held.gathered_bytes)),
        ("activations", "r", lambda one: format_bytes(one.held.activations_bytes + one.held.head_and_loss_bytes)),
        ("other", "r", lambda one: format_bytes(one.held.temporaries_bytes + one.held.outside_bytes)),
        ("all of it", "r", lambda one: format_bytes(one.total_bytes)),
        ("fits", "l", lambda one: "yes" if one.fits else "no"),
    )  # fmt: skip


def _line(text: str) -> Block:
    return Paragraph(words=(text,))


def _summary(predicted: Sequence[PredictedModel]) -> Table:
    return table_of(
        "", predicted,
        ("model", "l", lambda one: one.model),
        ("parameters", "r", lambda one: f"{one.parameters / 1e6:.1f} M"),
        ("rows", "r", lambda one: f"at least {one.rows}" if one.limited else str(one.rows)),
        ("range", "r", lambda one: None if one.limited else f"{one.rows_low} to {one.rows_high}"),
        ("slot tokens", "r", lambda one: format_count(one.rows * one.config.seq_length_tokens)),
        ("real tokens", "r", lambda one: format_count(one.real_tokens)),
        ("samples", "r", lambda one: format_count(one.samples)),
        ("peak", "r", lambda one: format_bytes(one.ledger.peak_bytes)),
        ("one more row", "r", lambda one: format_bytes(one.per_row_bytes)),
    )  # fmt: skip


def _one(one: PredictedModel) -> Iterator[Block]:
    config = one.config
    yield _line(
        f"{config.model.name}: {config.layout} rows of {config.seq_length_tokens}, {config.precision}, "
        f"{one.attention} attention ({one.attention_reason}), checkpointing {config.checkpointing}, "
        f"{config.head} head, budget {format_bytes(one.budget_bytes)}"
    )
    yield _breakdown(one.ledger)
    lost = one.ledger.terms_bytes.get(Term.ROUNDING, 0)
    if lost > _MUCH_SHARE * one.ledger.peak_bytes:
        yield _line(f"{format_bytes(lost)} are free blocks that no request fits, and rounding")
    if one.shares:
        yield shares_table(one.shares, "Shared among GPUs, one micro-batch of the same rows")


def _breakdown(ledger: MemoryBreakdown) -> Table:
    large = {term: size for term, size in ledger.terms_bytes.items() if size >= _SMALL_SHARE * ledger.peak_bytes}
    sizes: list[tuple[str, int]] = sorted(large.items(), key=lambda item: -item[1])
    rest = ledger.peak_bytes - sum(large.values())
    sizes += [("everything else", rest)] if rest else []
    return table_of(
        "", [*sizes, ("at the peak", ledger.peak_bytes)],
        (f"term at {ledger.rows} rows", "l", lambda item: item[0]),
        ("bytes", "r", lambda item: format_bytes(item[1])),
        ("share", "r", lambda item: f"{item[1] / ledger.peak_bytes:.1%}"),
    )  # fmt: skip


def _what_if_table(what_if: Sequence[Mapping[str, Any]]) -> Table:
    settings = ("model", "precision", "attention", "checkpointing", "head", "layout")
    return table_of(
        "What if (rows that are predicted to fit)", what_if,
        *((name, "l", itemgetter(name)) for name in settings),
        ("rows", "r", lambda one: one["note"] if one["rows"] is None else f"{one['rows']} {one['note']}".rstrip()),
        ("real tokens", "r", lambda one: format_count(one["real_tokens"])),
    )  # fmt: skip
