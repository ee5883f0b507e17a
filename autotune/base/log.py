"""Messages of the library, which ``logging`` passes to you.

The command line shows them on standard error. In your own program, warnings are shown
by default; ``logging.getLogger("autotune").setLevel("INFO")`` shows the others too.
"""

import logging
import sys

LOG = logging.getLogger("autotune")
"""Logger of all messages."""


class _Formatter(logging.Formatter):
    """Format of the command line: the message, after ``warning:`` if it is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a message."""
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {message}"
        return message


class _StandardError(logging.Handler):
    """Writes to the present ``sys.stderr``, which tests and callers may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        sys.stderr.write(f"{self.format(record)}\n")


def show_messages() -> None:
    """Show all messages on standard error, as the command line does."""
    if any(isinstance(handler, _StandardError) for handler in LOG.handlers):
        return
    handler = _StandardError()
    handler.setFormatter(_Formatter())
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
