"""Progress of a running tuning.

It is a table of its phases on a terminal, and lines elsewhere.
"""

import contextlib
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.base.clock import Clock
from autotune.trials.trial_bench import Display
from autotune.trials.values import FinishedTrial
from autotune.tune.decide import left_s
from autotune.tune.sections import best_words, stage_words, stages_text
from autotune.tune.values import Stage
from trainer.formats.progress import Update, progress


@dataclass(slots=True, kw_only=True)
class TuningView(Display):
    """Live display of a tuning's phases, which the tuning updates."""

    clock: Clock
    budget_s: float
    planned: list[Stage] = field(default_factory=list)
    """Phases that are not left out; empty until they are known."""
    began_s: float = field(init=False)
    _live: bool = False
    """True if a table is shown; other output on standard error then appears above
    it."""
    _stage: Stage | None = None
    _stage_began_s: float = 0.0
    _finished: list[FinishedTrial] = field(default_factory=list)
    _left_s: float = math.inf
    """Least time left that was shown, in seconds."""
    _interrupted_s: float | None = None
    """Seconds after which the tuning was interrupted."""

    def __post_init__(self) -> None:
        self.began_s = self.clock.monotonic_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the tuning began."""
        return self.clock.monotonic_s() - self.began_s

    def interrupt(self) -> None:
        """Stop the clock and the countdown: only processes are left to end."""
        if self._interrupted_s is None:
            self._interrupted_s = self.elapsed_s

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Show the table until the block ends, if standard error is a terminal."""
        self._live = sys.stderr.isatty()
        if not self._live:
            yield
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(stderr=True)
        with Live(
            get_renderable=lambda: Text(self._text()),
            console=console,
            refresh_per_second=2,
        ) as live:
            yield
            live.refresh()

    def begin(self, stage: Stage) -> None:
        """Mark a phase as running, and start its timer."""
        self._stage, self._finished = stage, []
        self._stage_began_s = self.clock.monotonic_s()
        stage.status = "running"

    def end(self, stage: Stage) -> None:
        """Stop the timer of a finished phase.

        Without a table, its status and result are written.
        """
        if stage is self._stage:
            stage.seconds = self.clock.monotonic_s() - self._stage_began_s
            self._stage = None
        if not self._live:
            words = (
                f"tune {1 + self.planned.index(stage)}/{len(self.planned)}:"
                f" {stage.name} {stage.model}".rstrip()
            )
            sys.stderr.write(f"{words}: {stage_words(stage)}\n")

    def _text(self) -> str:
        if self._stage is not None:
            self._stage.seconds = self.clock.monotonic_s() - self._stage_began_s
        width = shutil.get_terminal_size().columns
        if self.planned:
            # A countdown never rises, although the estimate may on a slow machine.
            self._left_s = min(
                self._left_s, left_s(self.planned, self.budget_s - self.elapsed_s)
            )
        seconds = self.elapsed_s
        if self._interrupted_s is not None:
            seconds = self._interrupted_s
        return stages_text(
            self.planned,
            seconds=seconds,
            left_s=self._left_s,
            width=width,
            interrupted=self._interrupted_s is not None,
        )

    @contextlib.contextmanager
    def show(self, title: str, *, budget_s: float | None = None) -> Iterator[Update]:
        """Show the progress of a phase, in the table or on a line."""
        if self._live:
            yield self._update
            return
        # The phase ends with the tuning at the latest, if it is not bounded itself.
        rest_s = max(0.0, self.budget_s - self.elapsed_s)
        if budget_s is not None:
            rest_s = min(rest_s, budget_s)
        with progress(f"tune: {title}", budget_s=rest_s, never_rises=True) as plain:

            def both(done: float, total: float | None, note: str) -> None:
                self._update(done, total, note)
                plain(done, total, note)

            yield both

    def _update(self, done: float, total: float | None, note: str) -> None:
        if self._stage is not None:
            self._stage.done, self._stage.expected, self._stage.note = done, total, note

    def trial_finished(self, finished: FinishedTrial) -> None:
        """Show the best of the phase's trials so far."""
        self._finished.append(finished)
        if self._stage is not None:
            self._stage.best = best_words(self._finished)
