"""Choice of the checkpoint to start from, in the directory of a run's checkpoints.

No torch here.
"""

from pathlib import Path

from trainer.checkpoint.format import BadCheckpoint
from trainer.checkpoint.stored_checkpoints import (
    CorruptCheckpoint,
    StoredCheckpoint,
    clear_leftovers,
    list_checkpoints,
    newest_checkpoint,
    point_to_latest,
    read_checkpoint,
)
from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow, new_event


def choose_own_checkpoint(
    root: Path, attempt: int, *, gave_up: bool
) -> tuple[StoredCheckpoint | None, list[EventRow]]:
    """Find the checkpoint to resume a run from, and rename those that cannot be used.

    Args:
        root: Directory of the run's checkpoints.
        attempt: Number of this start of the run, which becomes part of the new names.
        gave_up: Whether the last start gave up. Only a checkpoint that is marked as
            good can then be used, as it is from before the trouble.

    Returns:
        The checkpoint, None if there is none, and an event for every corrupt one that
        is newer.

    Raises:
        DiskTrouble: If the file system fails.
        BadConfig: If this user is not allowed to read a checkpoint.
    """
    clear_leftovers(root)
    checkpoint, corrupt_checkpoints = newest_checkpoint(root, only_good=gave_up)
    # Renamed only after the search, as nothing may change if it fails.
    corruption_events = []
    for corrupt in corrupt_checkpoints:
        corruption_events.append(_put_aside_corrupt(corrupt, attempt))
    if gave_up:
        _put_aside_newer(root, checkpoint, attempt)
    if checkpoint is not None:
        point_to_latest(root, checkpoint.path.name)
    return checkpoint, corruption_events


def _put_aside_corrupt(corrupt: CorruptCheckpoint, attempt: int) -> EventRow:
    """Rename a corrupt checkpoint, and return the event that reports it."""
    path = corrupt.path
    aside = path.with_name(f"{path.name}.corrupt-{attempt}")
    path.rename(aside)
    return new_event(
        0,
        "resumed",
        f"checkpoint {path.name} is corrupt and is skipped: {corrupt.reason}; kept as"
        f" {aside.name}",
        level="error",
    )


def _put_aside_newer(
    root: Path, checkpoint: StoredCheckpoint | None, attempt: int
) -> None:
    """Rename checkpoints that are newer than the given one, or all if it is None.

    The run gave up after it saved them. If they kept their names, they would seem newer
    than those that this start saves.
    """
    for path in list_checkpoints(root):
        if checkpoint is not None and path == checkpoint.path:
            break
        path.rename(path.with_name(f"{path.name}.given-up-{attempt}"))


def list_put_aside_corrupt(root: Path) -> list[Path]:
    """List the corrupt checkpoints that this start or an earlier one has renamed."""
    return list(root.glob("step-*.corrupt-*"))


def newest_of_other_run(root: Path) -> tuple[StoredCheckpoint, list[EventRow]]:
    """Find the newest intact checkpoint of another run, whose files stay as they are.

    Args:
        root: Directory of the other run's checkpoints.

    Returns:
        The checkpoint, and an event for every newer one that is corrupt.

    Raises:
        BadConfig: If no checkpoint is intact.
    """
    checkpoint, corrupt_checkpoints = newest_checkpoint(root)
    if checkpoint is None:
        raise BadConfig(
            f"{root} has no intact checkpoint",
            next_step="Start from scratch with another --out, or pass another run",
        )
    corruption_events = [
        new_event(
            0,
            "resumed",
            f"a checkpoint is corrupt and is skipped: {corrupt.reason}",
            level="error",
        )
        for corrupt in corrupt_checkpoints
    ]
    return checkpoint, corruption_events


def read_named_checkpoint(path: Path) -> StoredCheckpoint:
    """Read and check a checkpoint that was named by its path.

    Raises:
        BadConfig: If it is corrupt.
    """
    try:
        return StoredCheckpoint(path=path, manifest=read_checkpoint(path))
    except BadCheckpoint as error:
        raise BadConfig(
            f"the checkpoint is corrupt: {error}",
            next_step="Pass an older one, or the run: --resume RUN",
        ) from error


def check_newest(checkpoint: Path, run: Path) -> None:
    """Check that a run has no newer checkpoint, as resuming would discard it.

    Raises:
        BadConfig: If it has one.
    """
    checkpoints = list_checkpoints(checkpoint.parent)
    if checkpoints and checkpoints[0] == checkpoint:
        return
    raise BadConfig(
        f"{run} has newer checkpoints than {checkpoint.name}",
        next_step=(
            "Start another run from it with --out DIR, or resume from the newest:"
            f" --resume auto --out {run}"
        ),
    )
