"""One stage of the queue: a command, its time, and what it needs."""

import importlib.util
from dataclasses import dataclass

from autotune.base.units import format_bytes

PROFILES, RUNS, LOGS = "profiles", "runs", "logs"
"""Folders of a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of the queue.

    In its words and paths, ``{gpu}`` stands for the short name of the GPU.
    """

    name: str
    """Name, unique in the queue."""
    words: tuple[str, ...]
    """Arguments of Python; ``{minutes}`` and ``{seconds}`` become the share of the
    stage's time that is for its measurements."""
    least_s: float
    """Time without which it does not begin, in seconds."""
    most_s: float
    """Longest time it may take, in seconds."""
    measuring_share: float = 0.8
    """Share of its time for measurements; processes start and end in the rest."""
    ending_s: float = 3.0
    """Time it gets to end when the rest is over, in seconds; then it is killed."""
    code: tuple[str, ...] = ("autotune", "trainer")
    """Packages and files, relative to the repository, whose code the result depends
    on."""
    reads: str | None = None
    """Path that another stage writes, or a kept check has."""
    writes: str | None = None
    """Path that a later stage reads."""
    from_scratch: str | None = None
    """Path that is removed before it begins; any other stage continues what is there.
    """
    reference: str | None = None
    """Name of a stage that must have ended in the same call: a figure compares both."""
    least_memory_bytes: int = 0
    """Least memory of the GPU."""
    gpus: int = 1
    """GPUs that it takes."""
    modules: tuple[str, ...] = ()
    """Modules that must be installed."""
    unavailable: str | None = None
    """Reason why it cannot run in this version, such as an unknown setting."""
    is_training: bool = False
    """True for a training that other trainers of the same call are compared with."""
    every_call: bool = False
    """True if it runs in every call, as each may be on another machine."""
    answer: str | None = None
    """File that holds its JSON; None for standard output."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes of a stage that ended."""

    @property
    def gpu_words(self) -> str:
        """Description of the GPU that it needs."""
        words = []
        if self.gpus > 1:
            words.append(f"{self.gpus} GPUs")
        if self.least_memory_bytes:
            words.append(f"at least {format_bytes(self.least_memory_bytes)} (H200)")
        return ", ".join(words) or "any"

    def missing_module(self) -> str | None:
        """Return a module that is not installed, or None."""
        for module in self.modules:
            try:
                spec = importlib.util.find_spec(module)
            except ModuleNotFoundError:  # of its parent
                spec = None
            if spec is None:
                return module
        return None


def fill(text: str, **values: str) -> str:
    """Replace the placeholders of a stage's words or paths.

    Other braces, as in code, stay.
    """
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
