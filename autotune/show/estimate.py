"""An estimate as text: what is predicted to fit, the ledger of where the memory goes, what if."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.allocations import Term
from autotune.core.rows import RowContents
from autotune.core.units import format_bytes, format_count
from autotune.decide.memory import Ledger
from autotune.decide.sharding import ShardedBytes
from autotune.errors import AutotuneError
from autotune.show.estimated import EstimatedProfile, estimated_text
from autotune.show.tables import text_table
from trainer.config import TrainConfig

_SMALL_SHARE = 0.001
"""Terms below this are summed up."""
_MUCH_SHARE = 0.05
"""Of the peak, lost between blocks: worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of one model on one card."""

    config: TrainConfig
    parameters: int
    attention: str
    attention_reason: str
    budget_bytes: int
    rows: int
    rows_low: int
    """With everything that is assumed at its most."""
    rows_high: int
    ledger: Ledger
    per_row_bytes: float
    """Of one more row, at the predicted number."""
    contents: RowContents
    traces: int
    sharded: tuple[tuple[str, ShardedBytes], ...] = ()
    limited: bool = False
    """Whether more may fit, and none was looked for."""

    @property
    def real_tokens(self) -> float | None:
        """Of the rows; None where no dataset was named."""
        return None if self.contents.assumed else self.rows * self.contents.mean_real_tokens

    @property
    def samples(self) -> float | None:
        """Of the rows; None where no dataset was named."""
        return None if self.contents.assumed else self.rows * self.contents.mean_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One line of the table of alternatives; ``rows`` is None where ``note`` says why there is no answer."""

    model: str
    precision: str
    attention: str
    checkpointing: str
    head: str
    layout: str
    rows: int | None
    real_tokens: float | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that was predicted for one card."""

    target: str
    """The card."""
    predicted: tuple[Predicted, ...]
    refused: tuple[tuple[str, AutotuneError], ...]
    """Models that do not fit or cannot be predicted, and why."""
    what_ifs: tuple[WhatIf, ...]
    traced_with: str
    """Versions of the libraries whose step was traced."""
    reserve_bytes: int = 0
    """Of the card's memory, left out of the budget."""


def estimate_text(answer: Answer, next_commands: Sequence[str], written: Sequence[EstimatedProfile] = ()) -> str:
    """The answer for people; empty where every model was refused and nothing else was asked.

    Args:
        answer: What was predicted.
        next_commands: That measure it.
        written: Profiles that say it.
    """
    parts = []
    if answer.predicted:
        parts.append(_summary(answer.predicted))
        parts += [_one(one) for one in answer.predicted]
    if answer.what_ifs:
        parts.append("What if (rows that are predicted to fit)\n" + _what_if_table(answer.what_ifs))
        if any(one.attention == "varlen" for one in answer.what_ifs):
            parts.append(
                "varlen lines leave out the dropout of attention weights: where a model has it, the recipe changes"
            )
    if written:
        parts.append(estimated_text(written))
    if answer.predicted:
        parts.append("\n".join(f"next: measure it there: {command}" for command in next_commands))
    reserve = f", of which {format_bytes(answer.reserve_bytes)} are left free" if answer.reserve_bytes else ""
    head = f"Predicted for {answer.target}{reserve}; nothing was measured."
    return "\n\n".join([head, *parts]) if parts else ""


def _summary(predicted: Sequence[Predicted]) -> str:
    headers = ("model", "parameters", "rows", "range", "slot tokens", "real tokens", "samples", "peak", "one more row")
    rows: list[list[str | None]] = [
        [
            one.config.model.name,
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


def _one(one: Predicted) -> str:
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
    if one.sharded:
        parts.append("Shared among GPUs, one micro-batch of the same rows (formulas, not measured)\n" + _shards(one))
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


def _shards(one: Predicted) -> str:
    headers = (
        "", "parameters", "gradients", "optimizer", "activations", "head and loss", "gathered", "temporary", "outside",
        "all of it",
    )  # fmt: skip
    rows: list[list[str | None]] = [
        [
            name,
            *(
                format_bytes(size)
                for size in (
                    shard.parameters_bytes,
                    shard.gradients_bytes,
                    shard.optimizer_bytes,
                    shard.activations_bytes,
                    shard.head_and_loss_bytes,
                    shard.gathered_bytes,
                    shard.temporaries_bytes,
                    shard.outside_bytes,
                    shard.total_bytes,
                )
            ),
        ]
        for name, shard in one.sharded
    ]
    return text_table(headers, rows, align="lrrrrrrrrr")


def _what_if_table(what_ifs: Sequence[WhatIf]) -> str:
    headers = ("model", "precision", "attention", "checkpointing", "head", "layout", "rows", "real tokens")
    rows: list[list[str | None]] = [
        [
            one.model,
            one.precision,
            one.attention,
            one.checkpointing,
            one.head,
            one.layout,
            one.note if one.rows is None else f"{one.rows} {one.note}".rstrip(),
            format_count(one.real_tokens),
        ]
        for one in what_ifs
    ]
    return text_table(headers, rows, align="llllllrr")
