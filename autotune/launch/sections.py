"""Runs and tunings as tables for the console."""

from collections.abc import Sequence

from autotune.base.document import Block, Table, paragraph, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_count, format_seconds
from autotune.launch.status import RunStatus, TuningStatus


def status_text(
    runs: Sequence[RunStatus], tunings: Sequence[TuningStatus], *, has_queue: bool
) -> str:
    """Return tables of runs and tunings, and why runs ended.

    ``has_queue`` is True if SLURM was queried for their jobs.
    """
    blocks: list[Block] = []
    if runs:
        blocks.append(_run_table(runs))
    for run in runs:
        if run.reason and run.state != "finished":
            blocks.append(paragraph(f"{run.directory}: {run.reason}"))
    if tunings:
        blocks.append(_tuning_table(tunings))
    for tuning in tunings:
        if tuning.corrupt_lines:
            note = f"{tuning.corrupt_lines} corrupt lines in its trial log"
            blocks.append(paragraph(f"{tuning.directory}: {note}"))
    if not runs and not tunings:
        blocks.append(paragraph("no runs and no tunings found"))
    if not has_queue:
        blocks.append(
            paragraph(
                "SLURM cannot be queried here; states are from the run records only"
            )
        )
    return console_text(blocks)


def _run_table(runs: Sequence[RunStatus]) -> Table:
    return table_of(
        "",
        runs,
        ("run", "l", lambda run: run.directory),
        ("state", "l", lambda run: run.state),
        ("job", "l", lambda run: run.job),
        ("step", "r", _step),
        ("tokens/s", "r", lambda run: format_count(run.tokens_per_s)),
        ("last checkpoint", "l", lambda run: run.checkpoint),
        ("last step ago", "r", lambda run: format_seconds(run.seconds_since_step)),
    )


def _step(run: RunStatus) -> str | None:
    if run.step is None:
        return None
    return f"{run.step:,}/{format_count(run.max_steps)}"


def _tuning_table(tunings: Sequence[TuningStatus]) -> Table:
    return table_of(
        "",
        tunings,
        ("tuning", "l", lambda tuning: tuning.directory),
        ("trials", "r", lambda tuning: format_count(tuning.trials)),
        ("outcomes", "l", _outcomes),
        ("newest (UTC)", "l", lambda tuning: tuning.newest_utc),
        ("newest trial", "l", lambda tuning: tuning.newest),
    )


def _outcomes(tuning: TuningStatus) -> str:
    counts = [
        f"{count} {kind.replace('_', ' ')}"
        for kind, count in sorted(tuning.outcomes.items())
    ]
    return ", ".join(counts)
