"""Progress on standard error: of any phase, and of rank 0 during training."""

import contextlib
import datetime
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from trainer.health.events import EventRow
from trainer.record.run_record import EvaluationRow, RunHeader, StepRow

Update = Callable[[float, float | None, str], None]
"""Progress callback with the arguments (done, total or None, note)."""

_LINE_INTERVAL_S = 5.0
"""Interval between lines without a terminal, and between points of the history."""
_HISTORY_POINTS = 12
"""Points that the estimate of the remaining time uses: about a minute."""


@contextlib.contextmanager
def progress(
    title: str, *, budget_s: float | None = None, never_rises: bool = False
) -> Iterator[Update]:
    """Show a phase's progress: a bar on a terminal, else a line every 5 s.

    Args:
        title: Name of the phase.
        budget_s: Time budget of the phase, in seconds, which the time left that is
            shown never exceeds; None if it has none.
        never_rises: Show at most the time left that was shown before. Trials take
            unequal times, so that an estimate from a few of them jumps.
    """
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    history = _History(deadline_s, never_rises=never_rises)
    if sys.stderr.isatty():
        with _bar(title, history) as update_bar:
            yield update_bar
    else:
        yield _line_writer(title, history)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """Progress at a moment."""

    moment_s: float
    done: float


class _History:
    """Records progress every few seconds, and estimates the time left from it.

    ``deadline_s`` is the end of the phase's time budget, None if it has none. With
    ``never_rises``, the time left is at most what was described before.
    """

    def __init__(self, deadline_s: float | None, *, never_rises: bool) -> None:
        self._deadline_s = deadline_s
        self._never_rises = never_rises
        self._described_s = math.inf
        self._points: deque[_Reached] = deque(maxlen=_HISTORY_POINTS)

    def add(self, done: float, total: float | None) -> bool:
        """Record the progress if it is time to; return whether it was."""
        now_s = time.monotonic()
        if self._points and not _is_finished(done, total):
            since_last_s = now_s - self._points[-1].moment_s
            if since_last_s < _LINE_INTERVAL_S:
                return False
        self._points.append(_Reached(moment_s=now_s, done=done))
        return True

    def describe_time_left(self, done: float, total: float | None) -> str:
        """Return the estimated time left, as text; empty if unknown or if finished."""
        if _is_finished(done, total):
            return ""
        first = self._points[0]
        last = self._points[-1]
        bounds_s = []
        if self._deadline_s is not None:
            if last.moment_s > self._deadline_s:
                return "over the time limit; finishing the minimum"
            bounds_s.append(self._deadline_s - last.moment_s)
        if total is not None and last.done > first.done:
            elapsed_s = last.moment_s - first.moment_s
            bounds_s.append((total - last.done) * elapsed_s / (last.done - first.done))
        if not bounds_s:
            return ""
        left_s = float(round(min(bounds_s)))
        if self._never_rises:
            left_s = min(left_s, self._described_s)
            self._described_s = left_s
        if left_s == 0:
            return "longer than expected"
        return f"{datetime.timedelta(seconds=left_s)} left"


def _is_finished(done: float, total: float | None) -> bool:
    return total is not None and done >= total


def _line_writer(title: str, history: _History) -> Update:
    """Return a callback that writes a line whenever the history gets a point."""

    def write_line(done: float, total: float | None, note: str) -> None:
        if not history.add(done, total):
            return
        line = f"{title}: "
        if total:
            line += f"{done / total * 100:3.0f} % "
        elif done:
            line += f"{done:g} "
        line += note
        time_left = history.describe_time_left(done, total)
        if time_left:
            line += f", {time_left}"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return write_line


@contextlib.contextmanager
def _bar(title: str, history: _History) -> Iterator[Update]:
    """Show a bar on the terminal, and yield the callback that updates it."""
    # Imported only if a bar is shown, to keep the start short.
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

        def update_bar(done: float, total: float | None, note: str) -> None:
            history.add(done, total)
            time_left = history.describe_time_left(done, total)
            bar.update(task, completed=done, total=total, note=note, left=time_left)

        yield update_bar


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
