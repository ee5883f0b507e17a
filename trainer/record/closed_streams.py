"""Output to a reader that may be gone, which must not end a run.

Examples are a closed terminal, and a ``tee`` that Ctrl-C ended before the trainer.
"""

import contextlib
import sys
from typing import TextIO


def ignore_closed_streams() -> None:
    """Ignore errors of writing to standard output and standard error, from now on."""
    sys.stdout = _ForgivingStream(sys.stdout)
    sys.stderr = _ForgivingStream(sys.stderr)


class _ForgivingStream:
    """Stream that discards its output, without an error, once its reader is gone.

    Everything else, such as ``isatty``, is that of the stream it replaces.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # A broken pipe is an OSError, a stream that Python has closed a ValueError.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
