"""Result of a confirmation, as text and as a section of the report."""

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import trimmed_mean
from autotune.base.wording import format_bounds, format_number, plural
from autotune.confirm.values import ConfirmEvidence, SplitRates
from autotune.kernels.sections import kernels_blocks
from autotune.report.values import ReportedProfile


def confirmed_words(confirm: ConfirmEvidence) -> str:
    """Return what was promised and delivered, in a line."""
    promised = confirm.promised
    between = format_bounds(promised.low, promised.high, format_number)
    words = f"promised {format_number(promised.value)} tokens/s"
    if between:
        words += f" ({between})"
    if confirm.delivered is None:
        return f"{words}; not delivered: {confirm.not_delivered}"
    return f"{words} · delivered {format_number(confirm.delivered.tokens_per_s)}"


def confirm_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on the promised rate, and the one that training delivered."""
    confirm = reported.profile.evidence.confirm
    if confirm is None:
        command = f"autotune tune --model {reported.profile.train.model.name}"
        return (
            doc.Missing(subject="Throughput as training will run", commands=(command,)),
        )
    facts: list[tuple[str, doc.Words]] = [
        ("Promised and delivered", (confirmed_words(confirm),))
    ]
    if confirm.delivered is not None:
        delivered = confirm.delivered
        facts.append(
            (
                "Delivered by",
                (
                    f"{plural(delivered.steps, 'step')} of training in"
                    f" {format_seconds(delivered.seconds)}",
                ),
            )
        )
    blocks = (doc.Pairs(pairs=tuple(facts)), _splits_table(confirm))
    if confirm.kernels is not None:
        return (*blocks, *kernels_blocks(confirm.kernels))
    reason = confirm.not_profiled or "not measured"
    return (*blocks, doc.Missing(subject="Kernels", state=reason, commands=()))


def _splits_table(confirm: ConfirmEvidence) -> doc.Table:
    """Return the table of the splits that were measured, the used one first."""

    def rate(row: SplitRates) -> float:
        return trimmed_mean(row.tokens_per_s)

    best = max(rate(row) for row in confirm.rows)
    return table_of(
        "Splits of the global batch in windows of training",
        confirm.rows,
        ("micro-batch size", "r", lambda row: str(row.micro_batch_size)),
        (
            "accumulation steps",
            "r",
            lambda row: str(row.gradient_accumulation_steps),
        ),
        ("tokens/s", "r", lambda row: format_number(rate(row))),
        ("share of best", "r", lambda row: format_share(rate(row) / best)),
        ("windows", "r", lambda row: str(len(row.tokens_per_s))),
    )
