"""What should fit a machine that is not here: all of it predicted or assumed."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.evidence import EstimateEvidence
from autotune.core.units import format_bytes, format_count, format_share
from autotune.show.report.document import Table
from autotune.show.report.inputs import ReportedProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where memory goes, by a trace."""

    terms: Mapping[str, int]
    """Bytes by term."""
    rows: int
    """Of the micro-batch."""
    measured_bytes: int | None = None
    """The peak of the same rows; None where nobody measured it."""


def predicted_ledger(estimate: EstimateEvidence) -> Ledger:
    """Of the largest micro-batch that should fit."""
    return Ledger(terms=estimate.terms_bytes, rows=estimate.rows_usual)


def predicted_fit(one: ReportedProfile, estimate: EstimateEvidence) -> Table:
    """The prediction, what it assumes, and what was made of it."""
    constraints, train = one.profile.constraints, one.profile.train
    known = "assumed, for want of a dataset" if estimate.rows_assumed else "of the dataset"
    usual = f"{estimate.rows_usual} rows of {train.seq_length_tokens} tokens"
    rows: list[list[str | None]] = [
        ["card", estimate.card],
        ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)],
        ["largest micro-batch that should fit", f"{usual}{', or more' if estimate.limited else ''}"],
        ["with all that is assumed at its most", f"{estimate.rows_least} rows"],
        ["with all that is assumed at its least", f"{estimate.rows_most} rows"],
        ["peak of the largest", format_bytes(estimate.predicted_peak_bytes)],
        ["parameters", format_count(estimate.parameters)],
        ["vocabulary", f"{format_count(estimate.vocab_size)}, {known}"],
        ["ranks that step together", str(estimate.local_ranks)],
        ["micro-batches of a step", "several" if estimate.micro_batches_per_step > 1 else "one"],
        ["layout of rows", train.layout],
        ["real tokens in a row, mean", f"{estimate.mean_real_tokens_per_row:.1f}, {known}"],
        ["documents in a row, at most", f"{estimate.documents_per_row:.1f}, {known}"],
        ["attention", f"{estimate.attention}: {estimate.attention_reason}"],
        ["traced with", estimate.traced_with],
        ["headroom left free", format_share(constraints.headroom_share)],
        ["micro-batch used", f"{train.micro_batch_rows} rows: {estimate.choice}"],
    ]
    return Table(caption="What should fit (predicted; nothing was measured)", headers=("what", "value"),
                 rows=tuple(rows))  # fmt: skip
