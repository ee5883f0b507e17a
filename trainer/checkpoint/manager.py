"""Saving and restoring the training state of a run.

A save copies the state to host memory, and a thread writes the copy to disk, so the
step after a save waits only for the copy. If the disk or a quota is full, the save
fails and training continues; earlier checkpoints stay, and the failure is an event of
the run.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.build import Training
from trainer.checkpoint import format as disk
from trainer.checkpoint.format import (
    CheckpointManifest,
    StoredCheckpoint,
    TrainingState,
)
from trainer.checkpoint.tensors import (
    HostCopy,
    TensorShard,
    make_optimizer_state,
    restore,
    tensor_shards,
)
from trainer.config.train_config import TrainConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import TrainerError, TrainingFailed
from trainer.health.events import EventRow, new_event

_LOWEST_PRIORITY = 19
"""Niceness of the writing thread while nothing waits for it, so that training comes
first on a busy machine."""
_ROUND_S = 0.5
"""Interval between collectives while ranks wait for a save, in seconds."""
_ABANDONED_S = 20.0
"""Longest wait for an abandoned save, in seconds; torchrun kills ranks 30 s after
SIGTERM."""
_ASSUMED_BYTES_PER_S = 100e6
"""Speed of the disk from which the duration of the first save is estimated."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One save of this rank."""

    state: TrainingState
    name: str
    began_s: float
    """Time of the performance counter when the save was requested."""
    urgent: bool
    """True if training waits for it."""


class CheckpointManager:
    """Saves and restores checkpoints of a run, at the same steps on every rank.

    ``progressed`` is called meanwhile.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainConfig,
        training: Training,
        ranks: Ranks,
        *,
        attempt: int,
        report_event: Callable[[EventRow], None],
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = directory / disk.CHECKPOINTS_DIRECTORY
        self._settings = config.checkpoint
        self.enabled = config.checkpoint.enabled
        self._training = training
        self._ranks = ranks
        self._attempt = attempt
        self._report_event = report_event
        self._progressed = progressed
        # Below the process group's timeout, so that a waiting rank can still report
        # which rank is late.
        self._timeout_s = config.parallel.timeout_s / 2
        self._saves = 0
        self._copy: HostCopy | None = None
        self._allocation: threading.Thread | None = None
        self._writers: Sequence[int] = ()
        self._thread: threading.Thread | None = None
        self._unreported_events: deque[EventRow] = deque()
        self._last_save_s = time.monotonic()
        self.save_s = 0.0
        """Duration of the last save, in seconds; an estimate before the first."""
        if self.enabled:
            self.save_s = 1.0 + state_bytes(training) / _ASSUMED_BYTES_PER_S
        self.newest: str | None = None
        """Name of the newest checkpoint that this rank knows of."""
        self.last_state_step: int | None = None
        """Step of the last state that was restored, or that a save was attempted
        for."""
        if self.enabled:
            self._start_allocating()

    def _start_allocating(self) -> None:
        """Allocate the copy in the background, so that the first save does not wait."""
        shards = self._shards_to_save()
        if not shards:
            return
        self._allocation = threading.Thread(
            target=self._allocate_copy,
            args=(shards,),
            name="checkpoint buffers",
            daemon=True,
        )
        self._allocation.start()

    def _allocate_copy(self, shards: Sequence[TensorShard]) -> None:
        if self._ranks.device.type == "cuda":
            # A thread begins with the first GPU.
            torch.cuda.set_device(self._ranks.device)
        # The save tries again and reports the error.
        with contextlib.suppress(MemoryError, RuntimeError):
            self._copy = self._new_copy(shards)

    def _new_copy(self, shards: Sequence[TensorShard]) -> HostCopy:
        return HostCopy(
            shards,
            f"rank-{self._ranks.rank:05d}.safetensors",
            pinned=self._ranks.device.type == "cuda",
        )

    def _shards_to_save(self) -> list[TensorShard]:
        """Return the tensors that this rank writes.

        This creates the optimizer's state if needed.
        """
        make_optimizer_state(self._training)
        shards = tensor_shards(self._training, self._ranks)
        return [shard for shard in shards if shard.saved_here]

    def owns(self, path: Path) -> bool:
        """Return whether a checkpoint belongs to this run."""
        return path.parent.resolve() == self._root.resolve()

    @property
    def busy(self) -> bool:
        """True while this rank writes a save."""
        return self._thread is not None and self._thread.is_alive()

    def is_due_by_time(self) -> bool:
        """Return whether the save interval has passed on this rank's clock.

        False while a save is being written.
        """
        return (
            self.enabled
            and time.monotonic() - self._last_save_s >= self._settings.interval_s
            and not self.busy
        )

    def is_due(self, step: int, requested_at: int | None) -> bool:
        """Return whether to save after a step.

        It is if the step's number is due, or if rank 0 requested a save, at the step
        ``requested_at``, since the last one.
        """
        if self.enabled:
            for interval in (
                self._settings.interval_steps,
                self._settings.keep_every_steps,
            ):
                if interval is not None and step % interval == 0:
                    return True
        if requested_at is None:
            return False
        return self.last_state_step is None or requested_at > self.last_state_step

    def save(self, state: TrainingState, *, rollbacks: int, wait: bool = False) -> None:
        """Start a save.

        All ranks call it after the same step. ``wait`` also waits until it has
        succeeded or failed.
        """
        save = _Save(
            state=state,
            name=disk.checkpoint_name(state.step, rollbacks),
            began_s=time.perf_counter(),
            urgent=wait or not self._settings.asynchronous,
        )
        self._last_save_s = time.monotonic()
        self.last_state_step = state.step
        self._join()
        shards = self._shards_to_save()
        if not self._writers:
            self._writers = self._agree_on_writers(writes=len(shards) > 0)
        if shards:
            self._start_writing(shards, save)
        if save.urgent:
            self.wait()

    def _agree_on_writers(self, *, writes: bool) -> list[int]:
        """Return the ranks that write a share of every checkpoint."""
        by_rank = self._ranks.all_gather_float(float(writes))
        return [rank for rank, rank_writes in enumerate(by_rank) if rank_writes]

    def _start_writing(self, shards: list[TensorShard], save: _Save) -> None:
        """Copy the tensors to host memory, and start the thread that writes them."""
        self._saves += 1
        writer = disk.CheckpointWriter(
            self._root,
            save.name,
            attempt=self._attempt,
            rank=self._ranks.rank,
            writers=self._writers,
            timeout_s=self._timeout_s,
            number=self._saves,
            progressed=self._progressed,
        )
        try:
            copy = self._copy_to_host(shards)
        except (MemoryError, RuntimeError) as error:
            writer.give_up(error)
            first_line, _, _ = str(error).partition("\n")
            message = (
                f"host memory is too small for a copy of the state: {first_line[:200]}"
            )
            self._fail(save, OSError(errno.ENOMEM, message), stall_s=None)
            return
        stall_s = None if save.urgent else time.perf_counter() - save.began_s
        self._thread = threading.Thread(
            target=self._write,
            args=(writer, copy, save, stall_s),
            name="checkpoint writer",
            daemon=True,
        )
        self._thread.start()

    def _copy_to_host(self, shards: list[TensorShard]) -> HostCopy:
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None
        if self._copy is None:
            self._copy = self._new_copy(shards)
        self._copy.take(shards)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._copy

    def _write(
        self,
        writer: disk.CheckpointWriter,
        copy: HostCopy,
        save: _Save,
        stall_s: float | None,
    ) -> None:
        """Write a copy to disk; ``stall_s`` is the time that training waited for it."""
        if not save.urgent:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            writer.write(copy.content, copy.tensors, save.state)
        except Exception as error:  # noqa: BLE001 - border of this thread: training continues after any error, which is reported
            writer.give_up(error)
            self._fail(save, error, stall_s=stall_s)
            return
        self._succeed(save, stall_s=stall_s, size_bytes=len(copy.content))

    def _succeed(self, save: _Save, *, stall_s: float | None, size_bytes: int) -> None:
        """Remove old checkpoints, and queue the event of a save that succeeded."""
        removed = self._prune(save.state.step, self._settings.keep_last)
        seconds = time.perf_counter() - save.began_s
        self.save_s = seconds
        self.newest = save.name
        self._unreported_events.append(
            new_event(
                save.state.step,
                "saved",
                f"saved {save.name}{_shown(removed)}",
                values={
                    "stall_s": seconds if stall_s is None else stall_s,
                    "seconds": seconds,
                    "size_bytes": size_bytes,
                },
            )
        )

    def _fail(self, save: _Save, error: Exception, *, stall_s: float | None) -> None:
        """Queue the event of a save that failed.

        If the disk is full, first remove all checkpoints but the newest.
        """
        removed: list[str] = []
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            removed = self._prune(save.state.step, keep_last=1)
        seconds = time.perf_counter() - save.began_s
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        kept = "no checkpoint exists yet"
        if self.newest:
            kept = f"the newest checkpoint is still {self.newest}"
        self._unreported_events.append(
            new_event(
                save.state.step,
                "save_failed",
                f"cannot save step {save.state.step}: {reason}; {kept}; training"
                f" continues{_shown(removed)}",
                level="error",
                causes=[
                    "the disk or a quota is full",
                    "the file system failed or is unreachable",
                ],
                next_step=(
                    "Free disk space or raise the quota before the next save; a crash"
                    " until then loses more work."
                ),
                values={
                    "stall_s": seconds if stall_s is None else stall_s,
                    "seconds": seconds,
                    "size_bytes": 0,
                },
            )
        )

    def _prune(self, step: int, keep_last: int) -> list[str]:
        """Remove old checkpoints on rank 0; return the names of those removed."""
        if not self._ranks.leads:
            return []
        try:
            return disk.prune(
                self._root,
                keep_last=keep_last,
                keep_every_steps=self._settings.keep_every_steps,
            )
        except (OSError, TrainerError) as error:
            self._unreported_events.append(
                new_event(
                    step,
                    "not_removed",
                    f"cannot remove older checkpoints: {error}",
                    level="warning",
                    next_step=(
                        "Remove them, or grant this user permission; otherwise they"
                        " fill the disk."
                    ),
                )
            )
            return []

    def report_finished(self) -> None:
        """Report the events of finished saves."""
        while self._unreported_events:  # the thread may add one meanwhile
            self._report_event(self._unreported_events.popleft())

    def _join(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's save has ended, for at most ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None

    def wait(self) -> None:
        """Wait until no rank is saving.

        Ranks synchronise repeatedly, as a save may exceed the collective timeout.
        """
        busy_ranks = 1.0
        while busy_ranks:
            self._join(_ROUND_S)
            (busy_ranks,) = self._ranks.all_reduce_sum(float(self.busy))
            if not self.busy:
                self._progressed()  # a rank that writes reports progress while writing
        self._join()
        self.report_finished()

    def abandon(self) -> None:
        """Wait a limited time for a save in progress.

        Other ranks are gone, and this one is about to exit.
        """
        self._join(_ABANDONED_S)
        self.report_finished()

    def has_saved(self, step: int) -> bool:
        """Return whether the state after a step is saved, as rank 0 knows it.

        A collective.
        """
        return self._ranks.broadcast_object(
            self.newest is not None and disk.step_of(self.newest) == step
        )

    def restore(self, path: Path, manifest: CheckpointManifest) -> None:
        """Load a checkpoint's tensors into the training."""
        restore(
            self._training, path, manifest, self._ranks, progressed=self._progressed
        )
        self.last_state_step = manifest.state.step
        if self.owns(path):
            self.newest = path.name

    def newest_good(self) -> StoredCheckpoint:
        """Return the newest good checkpoint, which rank 0 finds for all.

        Raises:
            TrainingFailed: If there is none.
        """
        self.wait()
        checkpoint: StoredCheckpoint | None = None
        if self._ranks.leads:
            checkpoint, corrupt_checkpoints = disk.newest_checkpoint(
                self._root, only_good=True
            )
            for corrupt in corrupt_checkpoints:
                self._report_event(
                    new_event(
                        0,
                        "corrupt",
                        f"checkpoint {corrupt.path.name} is corrupt and is skipped:"
                        f" {corrupt.reason}",
                        level="error",
                        next_step="Check that disk.",
                    )
                )
        checkpoint = self._ranks.broadcast_object(checkpoint)
        if checkpoint is None:
            raise TrainingFailed(
                "cannot roll back: no good checkpoint exists",
                next_step=(
                    "Lower train.learning_rate or increase train.warmup_steps; save"
                    " more often with train.checkpoint.interval_steps."
                ),
            )
        return checkpoint


def _shown(removed: Sequence[str]) -> str:
    """Return the end of a message that names removed checkpoints, if there are any."""
    return f"; removed {', '.join(removed)}" if removed else ""


def state_bytes(training: Training) -> int:
    """Return the approximate size of a checkpoint.

    It holds all weights, and two optimizer values per trained weight.
    """
    total_bytes = 0
    for parameter in training.module.parameters():
        values_per_weight = 3 if parameter.requires_grad else 1
        total_bytes += parameter.nbytes * values_per_weight
    return total_bytes
