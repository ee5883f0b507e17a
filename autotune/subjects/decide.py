"""What a failure of your code says. Pure."""

import re

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
