"""Progress of a search, as its caller wants to see it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.trials.trial_bench import Display
from trainer.formats.progress import Update

Progress = bool | Update
"""True for a line on standard error, False for none, or a function to call with each
update: the amount completed, the total amount (None if unknown), and a note."""


@dataclass(frozen=True, slots=True)
class _CalledDisplay(Display):
    """Display that passes progress on to a function."""

    update: Update

    @contextlib.contextmanager
    def show(self, title: str, *, budget_s: float | None = None) -> Iterator[Update]:
        """Yield the function."""
        yield self.update


def update_of(progress: Progress) -> Update | None:
    """Return the function to call with each update; None for standard error."""
    if progress is True:
        return None
    if progress is False:
        return _ignore
    return progress


def display_of(progress: Progress) -> Display:
    """Return a display that shows progress as the caller wants it."""
    update = update_of(progress)
    return Display() if update is None else _CalledDisplay(update)


def _ignore(completed: float, total: float | None, note: str) -> None:
    """Show nothing."""
