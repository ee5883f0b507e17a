"""Words for a failure of your code. Pure."""

import re
from collections.abc import Sequence

from autotune.errors import AutotuneError, BadInput, Undecided
from autotune.trials.outcomes import Crashed, Outcome, TimedOut

_OURS = re.compile(
    r'^  File "[^"]*/autotune/(?:\w+/)+jobs/[^"]*".*\n(?:    .*\n)*',
    re.MULTILINE,
)
"""Part of a stack that is not your code's."""


def error_line(detail: str) -> str:
    """Return the last exception of a stack as one line.

    Of another text, it is the last line.
    """
    stack, _, _ = detail.strip().rpartition('\n  File "')
    lines = detail.strip()[len(stack) :].splitlines() or [""]
    return next(
        (line for line in lines[1:] if stack and not line.startswith(" ")), lines[-1]
    )


def crash_words(detail: str, where: str = "") -> str:
    """Return what your code did, for an error message.

    It is the exception and its stack in your code, or the end of its process.
    """
    if detail.startswith("exit code"):
        ended, _, printed = detail.partition(":")
        told = f"ended its process{where} ({ended}), as os._exit or a crash in C++ does"
        return f"{told}: {printed.strip()[-500:]}" if printed.strip() else told
    return f"failed{where}: {error_line(detail)}\n{_OURS.sub('', detail.strip())}"


def window_failure(
    functions: Sequence[str], label: str, outcome: Outcome
) -> AutotuneError | None:
    """Return an error that explains how functions of yours failed in a timed window.

    Args:
        functions: Names of the functions; none if the source is not yours.
        label: Name of the window.
        outcome: Outcome of the window, which may have succeeded.

    Returns:
        None if the window did not fail, or its failure has no better explanation than
        its outcome.
    """
    if not functions:
        return None
    names = " or ".join(functions)
    if isinstance(outcome, TimedOut):
        return Undecided(
            f"{names} did not end within its time limit in the window {label!r}:"
            f" {outcome.detail}",
            next_step=(
                "Allow more time with --trial-timeout; or mend the hang at that place."
            ),
        )
    if not isinstance(outcome, Crashed):
        return None
    next_step = "Fix it, and run the same command again: it resumes."
    if "num_workers > 0" in outcome.detail:
        next_step = (
            "No workers are tried, too: write persistent_workers=num_workers > 0, and"
            " so for its like."
        )
    crash = crash_words(outcome.detail, f" in the window {label!r}")
    return BadInput(f"{names} {crash}", next_step=next_step)
