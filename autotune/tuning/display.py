"""Who is told how a stage goes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from autotune.core.trial import FinishedTrial
from trainer.progress import Update, progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What a stage tells while it measures; by default one line of progress."""

    show: Callable[[str], AbstractContextManager[Update]] = progress
    """Begins something that takes long, by its title."""
    saw: Callable[[FinishedTrial], None] = lambda finished: None
    """Is told each finished trial."""


PLAIN = Display()
"""What commands show that measure one thing."""
