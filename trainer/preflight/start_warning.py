"""Warnings of the checks before the first step."""

from trainer.formats.events import EventRow, new_event


def start_warning(message: str, next_step: str) -> EventRow:
    """Return a warning event, which does not stop training from starting."""
    return new_event(0, "preflight", message, level="warning", next_step=next_step)
