"""Who is told how a stage goes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from autotune.core.trial import FinishedTrial
from trainer.progress import Update, progress


class Show(Protocol):
    """Begins something that takes long."""

    def __call__(self, title: str, *, most_s: float | None = None) -> AbstractContextManager[Update]:
        """By its title; ``most_s`` is its budget, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What a stage tells while it measures; by default one line of progress."""

    show: Show = progress
    saw: Callable[[FinishedTrial], None] = lambda finished: None
    """Is told each finished trial."""


PLAIN = Display()
"""What commands show that measure one thing."""
