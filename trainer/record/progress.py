"""Progress on standard error: of any phase, and of rank 0 during training."""

import contextlib
import datetime
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from trainer.health.events import EventRow
from trainer.record.run_record import EvaluationRow, RunHeader, StepRow

Update = Callable[[float, float | None, str], None]
"""Progress callback with the arguments (done, total or None, note)."""

PLAIN_INTERVAL_S = 5.0
_RATE_LINES = 12
"""Lines that the estimate of the remaining time uses: about a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """Progress at a moment."""

    moment_s: float
    done: float


@contextlib.contextmanager
def progress(title: str, *, budget_s: float | None = None) -> Iterator[Update]:
    """Show a phase's progress: a bar on a terminal, else a line every 5 s.

    Args:
        title: Name of the phase.
        budget_s: Time budget of the phase, in seconds, which the time left that is
            shown never exceeds; None if it has none.
    """
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    history: deque[_Reached] = deque(maxlen=_RATE_LINES)
    with _bar(title) if sys.stderr.isatty() else contextlib.nullcontext() as show:

        def update(done: float, total: float | None, note: str) -> None:
            now_s = time.monotonic()
            finished = total is not None and done >= total
            line_due = (
                not history
                or now_s - history[-1].moment_s >= PLAIN_INTERVAL_S
                or finished
            )
            if line_due:
                history.append(_Reached(moment_s=now_s, done=done))
            time_left = "" if finished else _time_left(history, total, deadline_s)
            if show is not None:
                show(completed=done, total=total, note=note, left=time_left)
            elif line_due:
                parts = [note]
                if total:
                    parts.insert(0, f"{done / total * 100:3.0f} %")
                elif done:
                    parts.insert(0, f"{done:g}")
                line = f"{title}: {' '.join(parts)}"
                if time_left:
                    line += f", {time_left}"
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

        yield update


def _time_left(
    history: Sequence[_Reached], total: float | None, deadline_s: float | None
) -> str:
    """Return the estimated time left, as text, from the rate of the last lines.

    The text is empty if it is unknown.
    """
    first = history[0]
    last = history[-1]
    if deadline_s is not None and last.moment_s > deadline_s:
        return "over the time limit; finishing the minimum"
    bounds_s = []
    if deadline_s is not None:
        bounds_s.append(deadline_s - last.moment_s)
    if total is not None and last.done > first.done:
        elapsed_s = last.moment_s - first.moment_s
        bounds_s.append((total - last.done) * elapsed_s / (last.done - first.done))
    if not bounds_s:
        return ""
    return f"{datetime.timedelta(seconds=round(min(bounds_s)))} left"


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a bar on the terminal, and yield the function that updates it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="", left="")
        yield functools.partial(bar.update, task)


def show_row(
    update: Update,
    max_steps: int,
    row: RunHeader | StepRow | EvaluationRow | EventRow,
) -> None:
    """Show a row of the run record.

    A logged step advances the bar; the header and all other rows are lines.

    Args:
        update: Progress callback of the bar.
        max_steps: Optimizer steps of the run.
        row: Header of the run record, or a row of it.
    """
    if isinstance(row, StepRow):
        loss = "n/a" if row.loss is None else f"{row.loss:.3f}"
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
        lines = [
            f"validation: step {row.step} loss {row.loss:.3f} perplexity"
            f" {row.perplexity:,.1f} masked accuracy {row.masked_accuracy:.1%}"
        ]
    else:
        lines = _event_lines(row)
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def _header_lines(header: RunHeader) -> list[str]:
    lines = [
        f"train: {header.global_batch_size} {header.layout} sequences per step;"
        f" attention: {header.attention} ({header.attention_reason})"
    ]
    if header.config["compile"]:
        lines.append(
            "train: compiling layers before the first step; this takes minutes"
        )
    lines += [f"train: recipe change: {change}" for change in header.recipe_changes]
    return lines


def _event_lines(event: EventRow) -> list[str]:
    if event.level == "info":
        return [f"train: {event.message}"]
    lines = [f"{event.level}: {event.message}"]
    lines += [f"  likely: {cause}" for cause in event.causes[:2]]
    if event.next_step:
        lines.append(f"  next: {event.next_step}")
    return lines


def ignore_closed_streams() -> None:
    """Ignore write errors on standard output and standard error.

    Their reader may be gone: a closed terminal, or a ``tee`` that Ctrl-C ended first.
    """
    sys.stdout = _ForgivingStream(sys.stdout)
    sys.stderr = _ForgivingStream(sys.stderr)


class _ForgivingStream:
    """Stream that discards its output, without an error, once its reader is gone."""

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
