"""Locks of other processes."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock during the block, as another process that copies a dataset does."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
