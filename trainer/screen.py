"""What rank 0 shows people, and streams that nobody reads any more. No torch here."""

import contextlib
import sys
from typing import TextIO

from trainer.events import EventRow
from trainer.progress import Update
from trainer.record import EvaluationRow, RunHeader, StepRow


class _Forgiving:
    """A stream whose reader may go away: what is then written is lost, and nothing else.

    Args:
        stream: That is written to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def forgive_closed_streams() -> None:
    """Let no terminal that is gone, and no ``tee`` that Ctrl-C ended first, end a training."""
    sys.stdout, sys.stderr = _Forgiving(sys.stdout), _Forgiving(sys.stderr)  # all that we use of them


class ProgressScreen:
    """What rank 0 shows: how the run computes, then every logged step."""

    def __init__(self, update: Update, steps: int) -> None:
        self._update, self._steps = update, steps

    def begin(self, header: RunHeader) -> None:
        """Say what was decided, and what is different from the model's recipe."""
        rows = f"{header.layout} rows, {header.global_batch_rows} a step"
        lines = [f"{rows}; attention: {header.attention} ({header.attention_reason})"]
        if header.config["compile_layers"]:
            lines.append("layers are compiled before the first step, which takes minutes")
        lines += [f"change of recipe: {change}" for change in header.recipe_changes]
        sys.stderr.write("".join(f"train: {line}\n" for line in lines))

    def step(self, row: StepRow) -> None:
        """Move the bar on."""
        mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        loss = "n/a" if row.loss is None else f"{row.loss:.3f}"
        note = f"step {row.step}/{self._steps} loss {loss} {row.real_tokens_per_s:,.0f} real tokens/s{mfu}"
        self._update(row.step, self._steps, note)

    def evaluation(self, row: EvaluationRow) -> None:
        """Show how the validation split fares."""
        sys.stderr.write(
            f"validation: step {row.step} loss {row.loss:.3f} perplexity {row.perplexity:,.1f} "
            f"masked accuracy {row.masked_accuracy:.1%}\n"
        )

    def event(self, row: EventRow) -> None:
        """Say what happened; what needs attention with likely causes, and what to do."""
        lines = [f"{row.level}: {row.message}" if row.level != "info" else f"train: {row.message}"]
        if row.level != "info":
            lines += [f"  likely: {cause}" for cause in row.causes[:2]]
            lines += [f"  next: {row.next_step}"] if row.next_step else []
        sys.stderr.write("".join(f"{line}\n" for line in lines))
