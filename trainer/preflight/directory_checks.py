"""Checks of the run directory.

It must have room for checkpoints, be visible to all ranks, and should have file locks.
"""

import secrets
import shutil
from pathlib import Path

from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow
from trainer.formats.train_config import TrainConfig
from trainer.preflight.ranks_text import ranks_text
from trainer.preflight.start_warning import start_warning
from trainer.record.writer import RunWriter
from trainer.runtime.ranks import Ranks

CHECKPOINTS_THAT_FIT = 2
"""Fewest checkpoints that must fit on disk: the newest is kept until the next one is
complete."""


def check_directory(
    writer: RunWriter,
    config: TrainConfig,
    checkpoint_bytes: int,
    existing_checkpoints: int,
    ranks: Ranks,
) -> list[EventRow]:
    """Check that the run directory can keep the checkpoints, and return warnings.

    Args:
        writer: Writer of the run record.
        config: Configuration of the run.
        checkpoint_bytes: Size of a checkpoint.
        existing_checkpoints: Number of checkpoints in the directory; only that of rank
            0 is used.
        ranks: This process's rank.

    Raises:
        BadConfig: If a new run has no room for its checkpoints, or if some rank does
            not see the directory although it writes a part of each checkpoint.
    """
    warnings = check_room(
        writer.directory,
        checkpoint_bytes,
        ranks,
        existing_checkpoints=ranks.broadcast_object(existing_checkpoints),
        keep_last=config.checkpoint.keep_last,
    )
    # Under ddp, rank 0 alone writes checkpoints; otherwise every rank writes its part.
    warnings += check_shared(
        writer.directory, ranks, needed=config.parallel.strategy != "ddp"
    )
    if ranks.leads and writer.lock is None:
        warnings.append(
            start_warning(
                f"the file system of {writer.directory} has no locks, so a second start"
                " is not prevented",
                "Make sure that no other job resumes this run at the same time.",
            )
        )
    return warnings


def check_room(
    directory: Path,
    checkpoint_bytes: int,
    ranks: Ranks,
    *,
    existing_checkpoints: int,
    keep_last: int = CHECKPOINTS_THAT_FIT,
) -> list[EventRow]:
    """Check that the disk has room for the checkpoints that exist at the same time.

    All ranks decide by the free space that rank 0 sees.

    Args:
        directory: Run directory.
        checkpoint_bytes: Size of a checkpoint.
        ranks: This process's rank.
        existing_checkpoints: Number of checkpoints in the directory.
        keep_last: Number of checkpoints to keep while the next one is written.

    Returns:
        A warning if the disk has no room for ``keep_last`` checkpoints and the next
        one, or none for a next one at all.

    Raises:
        BadConfig: If the run has no checkpoint yet, and there is no room for
            ``CHECKPOINTS_THAT_FIT``.
    """
    free_bytes = 0
    if ranks.leads:
        free_bytes = shutil.disk_usage(directory).free
    free_bytes = ranks.broadcast_object(free_bytes)
    free = f"{directory} has {free_bytes / 2**20:,.0f} MiB free"

    # Existing checkpoints have their room already; each save needs room for one more.
    checkpoints_to_keep_all = max(1, keep_last + 1 - existing_checkpoints)
    if free_bytes >= checkpoints_to_keep_all * checkpoint_bytes:
        return []

    checkpoints_to_save = max(1, CHECKPOINTS_THAT_FIT - existing_checkpoints)
    if free_bytes >= checkpoints_to_save * checkpoint_bytes:
        required_mib = (keep_last + 1) * checkpoint_bytes / 2**20
        return [
            start_warning(
                f"{free}; keeping {keep_last} checkpoints while writing the next"
                f" requires {required_mib:,.0f} MiB",
                "Free disk space, or lower train.checkpoint.keep_last; otherwise some"
                " saves will fail.",
            )
        ]

    required_mib = CHECKPOINTS_THAT_FIT * checkpoint_bytes / 2**20
    message = (
        f"{free}; {CHECKPOINTS_THAT_FIT} checkpoints require {required_mib:,.0f} MiB"
    )
    if existing_checkpoints:
        # The run has a state to return to, so it may continue at its own risk.
        return [start_warning(message, "Free disk space, or the next save will fail.")]
    raise BadConfig(
        message,
        next_step=(
            "Free disk space, choose another --out, or disable checkpoints: --set"
            " train.checkpoint.enabled=false"
        ),
    )


def check_shared(directory: Path, ranks: Ranks, *, needed: bool) -> list[EventRow]:
    """Check that all ranks see rank 0's run directory.

    Args:
        directory: Run directory.
        ranks: This process's rank.
        needed: Whether every rank writes its part of a checkpoint there.

    Returns:
        A warning if some rank does not see the directory and does not need it.

    Raises:
        BadConfig: If some rank does not see the directory, and it is ``needed``.
    """
    missing_on = _ranks_without_directory(directory, ranks)
    if not missing_on:
        return []
    message = f"{directory} of rank 0 not found on {ranks_text(missing_on)}"
    next_step = "Choose an --out on a file system that all nodes share."
    if needed:
        raise BadConfig(
            f"{message}, but all ranks write checkpoints there", next_step=next_step
        )
    message += ": they cannot record their exit in exit.json"
    return [start_warning(message, next_step)]


def _ranks_without_directory(directory: Path, ranks: Ranks) -> list[int]:
    """Return the ranks that do not see a file which rank 0 creates in a directory.

    It is not enough that a rank sees the directory, as its node may have another
    directory of that name. The name of the file is random, so no node has it already.
    """
    token = ranks.broadcast_object(secrets.token_hex(8) if ranks.leads else "")
    file = directory / f".seen-by-all-ranks.{token}"
    if ranks.leads:
        file.touch()
    ranks.all_reduce_sum(0.0)  # a barrier: no rank looks before the file exists
    is_missing_by_rank = ranks.all_gather_float(float(not file.exists()))
    if ranks.leads:
        file.unlink()
    return [rank for rank, is_missing in enumerate(is_missing_by_rank) if is_missing]
