"""How runs and tunings are doing, as text."""

from collections.abc import Sequence

from autotune.core.standing import RunStanding, TuningStanding
from autotune.core.units import format_count, format_seconds
from autotune.show.tables import inert, text_table

_RUN_HEADERS = ("run", "state", "job", "step", "real tokens/s", "last checkpoint", "last step ago")
_TUNING_HEADERS = ("tuning", "trials", "outcomes", "newest (UTC)", "newest trial")


def standings_text(runs: Sequence[RunStanding], tunings: Sequence[TuningStanding], *, asked: bool) -> str:
    """Two tables, and why runs ended.

    Args:
        runs: Training runs.
        tunings: Tunings.
        asked: Whether SLURM was asked for their jobs.
    """
    parts = []
    if runs:
        parts.append(text_table(_RUN_HEADERS, [_run_row(run) for run in runs], align="lllrrlr"))
        told = [run for run in runs if run.reason and run.state != "finished"]
        parts += [f"{inert(run.directory)}: {inert(run.reason)}" for run in told]
    if tunings:
        parts.append(text_table(_TUNING_HEADERS, [_tuning_row(one) for one in tunings], align="lr"))
        parts += [
            f"{inert(one.directory)}: {one.damaged_lines} lines of its ledger cannot be read"
            for one in tunings
            if one.damaged_lines
        ]
    if not parts:
        parts.append("no runs and no tunings here")
    if not asked:
        parts.append("SLURM cannot be asked from here: states are those of the records alone")
    return "\n".join(parts)


def _run_row(run: RunStanding) -> list[str]:
    step = None if run.step is None else f"{format_count(run.step)}/{format_count(run.max_steps)}"
    ago = None if run.seconds_since_step is None else format_seconds(run.seconds_since_step)
    shown = (run.directory, run.state, run.job, step, format_count(run.real_tokens_per_s), run.checkpoint, ago)
    return [inert(cell) for cell in shown]


def _tuning_row(one: TuningStanding) -> list[str]:
    outcomes = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(one.outcomes.items()))
    return [inert(cell) for cell in (one.directory, format_count(one.trials), outcomes, one.newest_utc, one.newest)]
