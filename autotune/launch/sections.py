"""Runs and tunings as tables for the console."""

from collections.abc import Sequence

from autotune.base.document import paragraph, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_count, format_seconds
from autotune.launch.status import RunStatus, TuningStatus


def status_text(
    runs: Sequence[RunStatus], tunings: Sequence[TuningStatus], *, asked: bool
) -> str:
    """Return tables of runs and tunings, and why runs ended.

    ``asked`` is True if SLURM was queried for their jobs.
    """
    ran = table_of(
        "",
        runs,
        ("run", "l", lambda run: run.directory),
        ("state", "l", lambda run: run.state),
        ("job", "l", lambda run: run.job),
        (
            "step",
            "r",
            lambda run: (
                None
                if run.step is None
                else f"{run.step:,}/{format_count(run.max_steps)}"
            ),
        ),
        ("tokens/s", "r", lambda run: format_count(run.tokens_per_s)),
        ("last checkpoint", "l", lambda run: run.checkpoint),
        ("last step ago", "r", lambda run: format_seconds(run.seconds_since_step)),
    )
    tuned = table_of(
        "",
        tunings,
        ("tuning", "l", lambda one: one.directory),
        ("trials", "r", lambda one: format_count(one.trials)),
        (
            "outcomes",
            "l",
            lambda one: ", ".join(
                f"{n} {k.replace('_', ' ')}" for k, n in sorted(one.outcomes.items())
            ),
        ),
        ("newest (UTC)", "l", lambda one: one.newest_utc),
        ("newest trial", "l", lambda one: one.newest),
    )
    ended = [
        f"{run.directory}: {run.reason}"
        for run in runs
        if run.reason and run.state != "finished"
    ]
    lost = (one for one in tunings if one.corrupt_lines)
    notes = [
        f"{one.directory}: {one.corrupt_lines} corrupt lines in its trial log"
        for one in lost
    ]
    notes += [] if runs or tunings else ["no runs and no tunings found"]
    notes += (
        []
        if asked
        else ["SLURM cannot be queried here; states are from the run records only"]
    )
    return console_text(
        [
            *([ran] if runs else []),
            *map(paragraph, ended),
            *([tuned] if tunings else []),
            *map(paragraph, notes),
        ]
    )
