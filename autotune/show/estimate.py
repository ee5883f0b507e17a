"""An estimate as text and as JSON: what is predicted to fit, the ledger of where the memory goes, what if."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.units import format_bytes, format_count
from autotune.decide.memory import ROUNDING, Ledger
from autotune.decide.sharding import ShardedBytes
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
    mean_real_tokens_per_row: float | None
    """None where no dataset was named."""
    mean_samples_per_row: float | None
    traces: int
    sharded: tuple[tuple[str, ShardedBytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One line of the table of alternatives; ``rows`` is None where the trainer refuses the combination."""

    model: str
    precision: str
    attention: str
    checkpointing: str
    head: str
    layout: str
    rows: int | None
    real_tokens: float | None


def estimate_text(target: str, predicted: Sequence[Predicted], what_ifs: Sequence[WhatIf]) -> str:
    """The answer for people."""
    parts = [f"Predicted for {target}; nothing was measured.", _summary(predicted)]
    parts += [_one(one) for one in predicted]
    if what_ifs:
        parts.append("What if (rows that are predicted to fit)\n" + _what_if_table(what_ifs))
    first = predicted[0].config.model.name
    parts.append(f"next: measure it on that card: autotune probe --model {first} --data DIR")
    return "\n\n".join(parts)


def estimate_json(target: str, predicted: Sequence[Predicted], what_ifs: Sequence[WhatIf]) -> dict[str, Any]:
    """The answer for machines; all of it predicted."""
    return {
        "target": target,
        "measured": False,
        "models": [
            {
                "model": one.config.model.name,
                "parameters": one.parameters,
                "attention": one.attention,
                "attention_reason": one.attention_reason,
                "budget_bytes": one.budget_bytes,
                "rows": one.rows,
                "rows_low": one.rows_low,
                "rows_high": one.rows_high,
                "slot_tokens": one.rows * one.config.seq_length_tokens,
                "real_tokens": _times(one.rows, one.mean_real_tokens_per_row),
                "samples": _times(one.rows, one.mean_samples_per_row),
                "peak_bytes": one.ledger.peak_bytes,
                "bytes_per_row": one.per_row_bytes,
                "ledger_bytes": dict(one.ledger.terms_bytes),
                "traces": one.traces,
                "sharded_bytes": {name: shard.total_bytes for name, shard in one.sharded},
            }
            for one in predicted
        ],
        "what_if": [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in what_ifs],
    }


def _summary(predicted: Sequence[Predicted]) -> str:
    headers = ("model", "parameters", "rows", "range", "slot tokens", "real tokens", "samples", "peak", "one more row")
    rows: list[list[str | None]] = [
        [
            one.config.model.name,
            f"{one.parameters / 1e6:.1f} M",
            str(one.rows),
            f"{one.rows_low} to {one.rows_high}",
            format_count(one.rows * one.config.seq_length_tokens),
            format_count(_times(one.rows, one.mean_real_tokens_per_row)),
            format_count(_times(one.rows, one.mean_samples_per_row)),
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
    lost = one.ledger.terms_bytes.get(ROUNDING, 0)
    if lost > _MUCH_SHARE * one.ledger.peak_bytes:
        parts.append(
            f"{format_bytes(lost)} go to rounding and fragmentation; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            "is worth a trial"
        )
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
    headers = ("", "parameters", "gradients", "optimizer", "activations", "head and loss", "gathered", "all of it")
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
                    shard.total_bytes,
                )
            ),
        ]
        for name, shard in one.sharded
    ]
    return text_table(headers, rows, align="lrrrrrrr")


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
            "not possible" if one.rows is None else str(one.rows),
            format_count(one.real_tokens),
        ]
        for one in what_ifs
    ]
    return text_table(headers, rows, align="llllllrr")


def _times(rows: int, per_row: float | None) -> float | None:
    return None if per_row is None else rows * per_row
