"""Checks of the run directory: room for checkpoints, visible to all ranks, locks."""

import secrets
import shutil
from pathlib import Path

from trainer.config.train_config import TrainConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.health.events import EventRow
from trainer.preflight.rank_checks import name_ranks
from trainer.preflight.start_warning import start_warning
from trainer.record.writer import RunWriter

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
        existing_checkpoints: Number of checkpoints in the directory, as rank 0 knows.
        ranks: This process's rank.

    Raises:
        BadConfig: If it cannot.
    """
    warnings = check_room(
        writer.directory,
        checkpoint_bytes,
        ranks,
        existing=ranks.broadcast_object(existing_checkpoints),
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
    existing: int,
    keep_last: int = CHECKPOINTS_THAT_FIT,
) -> list[EventRow]:
    """Check, on rank 0, that the disk has room for the checkpoints that exist at once.

    Args:
        directory: Run directory.
        checkpoint_bytes: Size of a checkpoint.
        ranks: This process's rank.
        existing: Number of checkpoints in the directory.
        keep_last: Number of checkpoints to keep while the next one is written.

    Returns:
        A warning if fewer than ``keep_last`` fit, or if the next save will fail.

    Raises:
        BadConfig: If the run has no checkpoint yet, and not even
            ``CHECKPOINTS_THAT_FIT`` fit.
    """
    free_bytes = 0
    if ranks.leads:
        free_bytes = shutil.disk_usage(directory).free
    free_bytes = ranks.broadcast_object(free_bytes)

    # Existing checkpoints have their room already; each save needs room for one more.
    new_if_all_are_kept = max(1, keep_last + 1 - existing)
    if free_bytes >= new_if_all_are_kept * checkpoint_bytes:
        return []
    free = f"{directory} has {free_bytes / 2**20:,.0f} MiB free"
    fewest_new = max(1, CHECKPOINTS_THAT_FIT - existing)
    if free_bytes >= fewest_new * checkpoint_bytes:
        required_mib = (keep_last + 1) * checkpoint_bytes / 2**20
        message = (
            f"{free}; keeping {keep_last} checkpoints while writing the next"
            f" requires {required_mib:,.0f} MiB"
        )
        next_step = (
            "Free disk space, or lower train.checkpoint.keep_last; otherwise some"
            " saves will fail."
        )
        return [start_warning(message, next_step)]

    required_mib = CHECKPOINTS_THAT_FIT * checkpoint_bytes / 2**20
    message = (
        f"{free}; {CHECKPOINTS_THAT_FIT} checkpoints require {required_mib:,.0f} MiB"
    )
    if existing:
        # The run has a state to return to, so it may continue at its own risk.
        next_step = "Free disk space, or the next save will fail."
        return [start_warning(message, next_step)]
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
        A warning if some rank does not see it.

    Raises:
        BadConfig: If some rank does not see it, and it is ``needed``.
    """
    missing_on = _ranks_without_directory(directory, ranks)
    if not missing_on:
        return []
    message = f"{directory} of rank 0 not found on {name_ranks(missing_on)}"
    next_step = "Choose an --out on a file system that all nodes share."
    if needed:
        raise BadConfig(
            f"{message}, but all ranks write checkpoints there", next_step=next_step
        )
    message += ": they cannot record their exit in exit.json"
    return [start_warning(message, next_step)]


def _ranks_without_directory(directory: Path, ranks: Ranks) -> list[int]:
    """Return the ranks that do not see a file which rank 0 creates in a directory.

    The directory itself proves nothing: a node may have another one of that name.
    """
    token = ranks.broadcast_object(secrets.token_hex(8) if ranks.leads else "")
    file = directory / f".seen-by-all-ranks.{token}"
    if ranks.leads:
        file.touch()
    ranks.all_reduce_sum(0.0)  # no rank looks before the file exists
    misses_by_rank = ranks.all_gather_float(float(not file.exists()))
    if ranks.leads:
        file.unlink()
    return [rank for rank, misses in enumerate(misses_by_rank) if misses]
