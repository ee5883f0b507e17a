"""Rows of a run record on the console, while the run trains."""

import sys

from trainer.formats.events import EventRow
from trainer.formats.progress import Update
from trainer.formats.run_record import EvaluationRow, RunHeader, StepRow

_SHOWN_CAUSES = 2
"""Causes of an event that are shown: the most likely ones, which come first."""


def show_row(
    update: Update,
    max_steps: int,
    row: RunHeader | StepRow | EvaluationRow | EventRow,
) -> None:
    """Show the header of a run record, or one of its rows.

    A logged step updates the progress; everything else is written to standard error.

    Args:
        update: Progress callback of the training.
        max_steps: Optimizer steps of the run.
        row: Header, or row.
    """
    if isinstance(row, StepRow):
        loss = _loss_text(row.loss)
        mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        note = (
            f"step {row.step}/{max_steps} loss {loss} {row.tokens_per_s:,.0f}"
            f" non-padding tokens/s{mfu}"
        )
        update(row.step, max_steps, note)
        return
    if isinstance(row, RunHeader):
        lines = _header_lines(row)
    elif isinstance(row, EvaluationRow):
        perplexity = "n/a" if row.perplexity is None else f"{row.perplexity:,.1f}"
        lines = [
            f"validation: step {row.step} loss {_loss_text(row.loss)} perplexity"
            f" {perplexity} masked accuracy {row.masked_accuracy:.1%}"
        ]
    else:
        lines = _event_lines(row)
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def _loss_text(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.3f}"


def _header_lines(header: RunHeader) -> list[str]:
    lines = [
        f"train: {header.global_batch_size} {header.layout} sequences per step;"
        f" attention: {header.attention} ({header.attention_reason})"
    ]
    if header.config["compile"]:
        lines.append(
            "train: compiling layers before the first step; this takes minutes"
        )
    if header.device != "cpu":
        lines += [
            f"train: GPU activity is not recorded: {reason}"
            for reason in header.gpu_activity_missing
        ]
    lines += [f"train: recipe change: {change}" for change in header.recipe_changes]
    return lines


def _event_lines(event: EventRow) -> list[str]:
    if event.level == "info":
        return [f"train: {event.message}"]
    lines = [f"{event.level}: {event.message}"]
    likely_causes = event.causes[:_SHOWN_CAUSES]
    lines += [f"  likely: {cause}" for cause in likely_causes]
    if event.next_step:
        lines.append(f"  next: {event.next_step}")
    return lines
