"""Events of the run record that report saves of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checkpoint.stored_checkpoints import CorruptCheckpoint
from trainer.formats.events import EventRow, new_event


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """Durations of a save, in seconds."""

    stall_s: float
    """Time for which training waited."""
    seconds: float
    """Time from the request to the end of writing."""

    def values(self, *, size_bytes: int) -> dict[str, float]:
        """Return the values of the save's event."""
        return {
            "stall_s": self.stall_s,
            "seconds": self.seconds,
            "size_bytes": size_bytes,
        }


def saved_event(
    step: int,
    checkpoint_name: str,
    *,
    times: SaveTimes,
    size_bytes: int,
    removed: Sequence[str],
) -> EventRow:
    """Report a save that succeeded; ``removed`` names checkpoints removed since."""
    return new_event(
        step,
        "saved",
        f"saved {checkpoint_name}{_removal_clause(removed)}",
        values=times.values(size_bytes=size_bytes),
    )


def save_failed_event(
    step: int,
    error: Exception,
    *,
    newest: str | None,
    times: SaveTimes,
    removed: Sequence[str],
) -> EventRow:
    """Report a save that failed, and from which checkpoint a crash would resume."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        # Without the number and the path, which ``str`` adds.
        reason = error.strerror
    newest_clause = "no checkpoint exists yet"
    if newest:
        newest_clause = f"the newest checkpoint is still {newest}"
    return new_event(
        step,
        "save_failed",
        f"cannot save step {step}: {reason}; {newest_clause}; training"
        f" continues{_removal_clause(removed)}",
        level="error",
        causes=[
            "the disk or a quota is full",
            "the file system failed or is unreachable",
        ],
        next_step=(
            "Free disk space or raise the quota before the next save; a crash until"
            " then loses more work."
        ),
        values=times.values(size_bytes=0),
    )


def _removal_clause(removed: Sequence[str]) -> str:
    """Return the end of a message that names removed checkpoints, if there are any."""
    if not removed:
        return ""
    return f"; removed {', '.join(removed)}"


def not_removed_event(step: int, error: Exception) -> EventRow:
    """Report that older checkpoints cannot be removed."""
    return new_event(
        step,
        "not_removed",
        f"cannot remove older checkpoints: {error}",
        level="warning",
        next_step=(
            "Remove them, or grant this user permission; otherwise they fill the disk."
        ),
    )


def corrupt_event(corrupt: CorruptCheckpoint) -> EventRow:
    """Report a corrupt checkpoint that a rollback skips."""
    return new_event(
        0,
        "corrupt",
        f"checkpoint {corrupt.path.name} is corrupt and is skipped: {corrupt.reason}",
        level="error",
        next_step="Check that disk.",
    )
