"""Result of a confirmation, as text and as a section of the report."""

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import trimmed_mean
from autotune.base.wording import format_number, plural
from autotune.confirm.decide import confirmed_words
from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.kernels.sections import kernels_blocks
from autotune.profiles.decide.follow_up import command, missing_probe_commands
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.store import StoredProfile


def confirm_text(confirm: ConfirmEvidence, stored: StoredProfile) -> str:
    """Return the promised and delivered rate and the next command, for the console.

    Args:
        confirm: Evidence of the confirmation.
        stored: Profile as it was before.
    """
    pairs = [("profile", str(stored.path))]
    next_command = command("report", stored.path)
    earlier_size = stored.profile.size
    size = confirm.rows[0].micro_batch_size
    if stored.profile.has_train and size != earlier_size:
        change = f"micro-batch {earlier_size} → {size}, which is faster"
        if stored.profile.evidence.baseline is not None:
            change += "; the speedup over untuned settings was that of the earlier one"
            next_command = command("baseline", stored.path)
        pairs.append(("changed", change))
    pairs.append(("next", next_command))
    blocks = (
        *_confirmation(confirm, stored.profile.subject.size),
        doc.Pairs(pairs=tuple((name, (words,)) for name, words in pairs)),
    )
    return console_text(blocks)


def confirm_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on the promised rate, and the one that training delivered."""
    confirm = reported.profile.evidence.confirm
    if confirm is None:
        return (_missing("Throughput as training will run", reported),)
    return _confirmation(confirm, reported.profile.subject.size)


def kernels_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on the slowest kernels of a step, and their bounds."""
    confirm = reported.profile.evidence.confirm
    if confirm is None:
        return (_missing("Kernels of a step", reported),)
    if confirm.kernels is None:
        reason = confirm.not_profiled or "not profiled"
        return (doc.Missing(subject="Kernels of a step", state=reason, commands=()),)
    return kernels_blocks(confirm.kernels)


def _confirmation(confirm: ConfirmEvidence, size_name: str) -> tuple[doc.Block, ...]:
    """Return what was promised and delivered, and the splits that were measured.

    Args:
        confirm: Evidence of the confirmation.
        size_name: Name of the size of a micro-batch.
    """
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
    if confirm.not_verified is not None:
        facts.append(("Not verified", (confirm.not_verified,)))
    return (doc.Pairs(pairs=tuple(facts)), _splits_table(confirm, size_name))


def _missing(subject: str, reported: ReportedProfile) -> doc.Missing:
    """Return that a part was not measured, with the command that measures it."""
    commands = (
        *missing_probe_commands(reported.profile, reported.path),
        f"autotune confirm {reported.quoted}",
    )
    return doc.Missing(subject=subject, commands=commands)


def _splits_table(confirm: ConfirmEvidence, size_name: str) -> doc.Table:
    """Return the table of the splits that were measured, the used one first."""

    def rate(row: SplitRates) -> float:
        return trimmed_mean(row.tokens_per_s)

    best = max(rate(row) for row in confirm.rows)
    heading = size_name
    if size_name == "micro_batch_size":
        heading = "micro-batch size"
    return table_of(
        "Splits of the global batch in windows of training",
        confirm.rows,
        (heading, "r", lambda row: str(row.micro_batch_size)),
        (
            "accumulation steps",
            "r",
            lambda row: str(row.gradient_accumulation_steps),
        ),
        (confirm.rate_unit, "r", lambda row: format_number(rate(row))),
        ("share of best", "r", lambda row: format_share(rate(row) / best)),
        ("windows", "r", lambda row: str(len(row.tokens_per_s))),
    )
