"""Result of a confirmation, as text and as a section of the report."""

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import trimmed_mean
from autotune.base.wording import format_number, plural
from autotune.confirm.decide import confirmed_words
from autotune.confirm.values import ConfirmEvidence, SplitRates
from autotune.kernels.sections import kernels_blocks
from autotune.profiles.decide.follow_up import tune_command
from autotune.report.values import ReportedProfile


def confirm_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on the promised rate, and the one that training delivered."""
    confirm = reported.profile.evidence.confirm
    if confirm is None:
        return (_missing("Throughput as training will run", reported),)
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
    return (doc.Pairs(pairs=tuple(facts)), _splits_table(confirm))


def kernels_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on the slowest kernels of a step, and their bounds."""
    confirm = reported.profile.evidence.confirm
    if confirm is None:
        return (_missing("Kernels of a step", reported),)
    if confirm.kernels is None:
        reason = confirm.not_profiled or "not profiled"
        return (doc.Missing(subject="Kernels of a step", state=reason, commands=()),)
    return kernels_blocks(confirm.kernels)


def _missing(subject: str, reported: ReportedProfile) -> doc.Missing:
    """Return that a part was not measured, with the command that measures it."""
    command = tune_command(reported.profile.train.model, "DIR")
    return doc.Missing(subject=subject, commands=(command,))


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
