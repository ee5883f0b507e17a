"""Training runs: what they were, whether they kept what was expected of them, and what needs attention."""

import statistics
from collections.abc import Sequence

from autotune.core.units import format_bytes, format_seconds, format_share
from autotune.decide.bottleneck import rows_of_this_start
from autotune.show.report.document import Block, Missing, Table
from autotune.show.report.events import events
from autotune.show.report.expected import expected
from autotune.show.report.figures import count, nats
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.report.loss import loss
from autotune.show.report.seen import SeenRun, seen
from autotune.show.report.steps import train_commands
from trainer.record import Run, StepRow


def runs(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """All runs in one table, expected against achieved in another, the loss, and events."""
    if not reported:
        return (Missing(what="Training (no run was given)", commands=train_commands(profiles[0])),)
    every = seen(profiles, reported)
    return (_table(every), _table_of_the_rest(every), *expected(every), *loss(reported), *events(every))


def later_steps(run: Run) -> tuple[StepRow, ...]:
    """Of the last start, without its first, which pays for the start; all, where that is all there is."""
    return rows_of_this_start(run) or run.steps


def _table(every: Sequence[SeenRun]) -> Table:
    headers = ("run", "profile", "ended", "ranks", "steps", "loss, first → last", "real tokens/s (median)",
               "MFU (median)", "data wait", "peak memory")  # fmt: skip
    return Table(
        caption="Training runs", headers=headers, rows=tuple(_cells(one) for one in every), align="lllrrrrrrr",
    )  # fmt: skip


def _cells(one: SeenRun) -> list[str | None]:
    run, later = one.reported.run, later_steps(one.reported.run)
    mfus = [step.mfu for step in later if step.mfu is not None]
    seconds = sum(step.step_s for step in later)
    return [
        one.reported.name,
        None if one.profile is None else one.profile.title,
        run.end.reason if run.end else "not finished",
        str(run.header.world_size),
        str(run.steps[-1].step) if run.steps else "0",
        f"{nats(run.steps[0].loss)} → {nats(run.steps[-1].loss)}" if run.steps else None,
        count(statistics.median(step.real_tokens_per_s for step in later)) if later else None,
        format_share(statistics.median(mfus)) if mfus else None,
        format_share(sum(step.data_wait_s for step in later) / seconds) if seconds else None,
        format_bytes(max(step.peak_memory_bytes for step in run.steps)) if run.steps else None,
    ]


def _table_of_the_rest(every: Sequence[SeenRun]) -> Table:
    headers = ("run", "profile found by", "validation loss", "MFU by 6N", "rows full", "start to first step", "events")
    return Table(
        caption="More of each run", headers=headers, rows=tuple(_more_cells(one) for one in every), align="llrrrrr",
    )  # fmt: skip


def _more_cells(one: SeenRun) -> list[str | None]:
    run, later = one.reported.run, later_steps(one.reported.run)
    by_6n = [step.mfu_6n for step in later if step.mfu_6n is not None]
    full = sum(step.real_tokens for step in later) / max(1, sum(step.slot_tokens for step in later))
    return [
        one.reported.name,
        one.reported.matched_by,
        f"{run.evaluations[-1].loss:.3f}" if run.evaluations else None,
        format_share(statistics.median(by_6n)) if by_6n else None,
        format_share(full) if later else None,
        format_seconds(run.startup.total_s) if run.startup else None,
        str(len(one.told)),
    ]
