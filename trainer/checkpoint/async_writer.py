"""Writing of checkpoints in the background.

A save copies the state to host memory, and a thread writes the copy to disk, so the
step after a save waits only for the copy. If the disk or a quota is full, or host
memory is too small for the copy, the save fails and training continues; earlier
checkpoints stay, and the failure is an event of the run.
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

from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import TrainingState
from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.save_events import (
    SaveTimes,
    not_removed_event,
    save_failed_event,
    saved_event,
)
from trainer.checkpoint.stored_checkpoints import prune
from trainer.checkpoint.tensors import TensorShard
from trainer.formats.errors import TrainerError
from trainer.formats.events import EventRow
from trainer.formats.train_config import TrainConfig
from trainer.runtime.ranks import Ranks

_LOWEST_PRIORITY = 19
"""Niceness of the writing thread unless training waits for it: on a busy machine,
training comes first."""
_NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Errors after which removing older checkpoints helps: full disk, or full quota."""
_MAX_REASON_LENGTH = 200
"""Length to which the message of a failed allocation is cut, in characters: about two
lines of a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request to save a checkpoint, the same on every rank except for ``began_s``."""

    state: TrainingState
    """State besides tensors."""
    checkpoint_name: str
    began_s: float
    """Time of the request by ``time.perf_counter``, in seconds."""
    training_waits: bool
    """True if training waits until the checkpoint is on disk."""

    def measure_times(self, stall_s: float | None) -> SaveTimes:
        """Return the durations of a save that ends now.

        Args:
            stall_s: Time for which training waited; None if it waited to the end.
        """
        seconds = time.perf_counter() - self.began_s
        return SaveTimes(
            stall_s=seconds if stall_s is None else stall_s, seconds=seconds
        )


class AsyncCheckpointWriter:
    """Writes this rank's share of checkpoints, in a thread, one checkpoint at a time.

    Args:
        root: Directory of the run's checkpoints.
        config: Configuration of training.
        ranks: This rank, and the number of all.
        attempt: Number of this start of the run, counted from 1.
        progressed: Callback while a checkpoint is written.
    """

    def __init__(
        self,
        root: Path,
        config: TrainConfig,
        ranks: Ranks,
        *,
        attempt: int,
        progressed: Callable[[], None],
    ) -> None:
        self._root = root
        self._settings = config.checkpoint
        self._ranks = ranks
        self._attempt = attempt
        self._progressed = progressed
        # Half of the process group's timeout, so that the first writer can still report
        # which rank is late.
        self._timeout_s = config.parallel.timeout_s / 2
        self._checkpoints_begun = 0
        self._copy: HostCopy | None = None
        self._allocation: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._unreported_events: deque[EventRow] = deque()
        self.last_duration_s: float | None = None
        """Duration of the last save that succeeded, in seconds."""
        self.newest: str | None = None
        """Name of the newest checkpoint that this rank knows of."""

    @property
    def busy(self) -> bool:
        """True while this rank writes a checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def start_allocating(self, shards: Sequence[TensorShard]) -> None:
        """Begin to allocate the copy, so that the first save need not wait for it."""
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
        """Allocate the copy; an error is left to the first save, which tries again."""
        if self._ranks.device.type == "cuda":
            # The current GPU is a property of each thread, and the first by default.
            torch.cuda.set_device(self._ranks.device)
        with contextlib.suppress(MemoryError, RuntimeError):
            self._copy = self._new_copy(shards)

    def wait_for_allocation(self) -> None:
        """Wait until the copy is allocated, or has failed to be."""
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def _new_copy(self, shards: Sequence[TensorShard]) -> HostCopy:
        """Allocate host memory for the tensors.

        Raises:
            MemoryError: If host memory is too small.
        """
        return HostCopy(
            shards,
            f"rank-{self._ranks.rank:05d}.safetensors",
            pinned=self._ranks.device.type == "cuda",
        )

    def start(
        self,
        shards: Sequence[TensorShard],
        request: SaveRequest,
        *,
        writing_ranks: Sequence[int],
    ) -> None:
        """Copy the tensors to host memory, and start the thread that writes them.

        Call ``join`` before, as all checkpoints share one copy. If host memory is too
        small, the save fails with an event, and no thread is started.

        Args:
            shards: Tensors that this rank writes.
            request: Checkpoint to write.
            writing_ranks: Ranks that write a share of it, in ascending order.

        Raises:
            RuntimeError: If torch cannot copy the tensors for another reason.
        """
        checkpoint_writer = self._new_checkpoint_writer(request, writing_ranks)
        try:
            copy = self._copy_to_host(shards)
        except MemoryError as error:
            checkpoint_writer.give_up(error)
            self._note_failure(request, _host_memory_error(error), stall_s=None)
            return
        stall_s = None
        if not request.training_waits:
            stall_s = time.perf_counter() - request.began_s
        # A daemon thread, as a file system that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=self._write,
            args=(checkpoint_writer, copy, request, stall_s),
            name="checkpoint writer",
            daemon=True,
        )
        self._thread.start()

    def _new_checkpoint_writer(
        self, request: SaveRequest, writing_ranks: Sequence[int]
    ) -> CheckpointWriter:
        """Return the writer of this rank's share, with the number of the next save."""
        self._checkpoints_begun += 1
        return CheckpointWriter(
            self._root,
            request.checkpoint_name,
            attempt=self._attempt,
            rank=self._ranks.rank,
            writing_ranks=writing_ranks,
            timeout_s=self._timeout_s,
            save_number=self._checkpoints_begun,
            progressed=self._progressed,
        )

    def _copy_to_host(self, shards: Sequence[TensorShard]) -> HostCopy:
        """Copy the tensors to host memory; after it returns, training may change them.

        Raises:
            MemoryError: If host memory is too small for the copy.
        """
        self.wait_for_allocation()
        if self._copy is None:
            self._copy = self._new_copy(shards)
        self._copy.take(shards)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._copy

    def _write(
        self,
        checkpoint_writer: CheckpointWriter,
        copy: HostCopy,
        request: SaveRequest,
        stall_s: float | None,
    ) -> None:
        """Write a copy to disk, in the thread.

        Args:
            checkpoint_writer: Writer of this rank's share.
            copy: Tensors of this rank.
            request: Checkpoint to write.
            stall_s: Time for which training waited; None if it waits to the end.
        """
        if not request.training_waits:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            checkpoint_writer.write(copy.content, copy.tensors, request.state)
        except Exception as error:  # noqa: BLE001 - border of this thread: training continues after any error, which is reported
            self._note_failure(request, error, stall_s=stall_s)
            return
        self._note_success(request, stall_s=stall_s, size_bytes=len(copy.content))

    def _note_success(
        self, request: SaveRequest, *, stall_s: float | None, size_bytes: int
    ) -> None:
        """Remove old checkpoints, and queue the event of this successful save."""
        step = request.state.step
        removed = self._prune(step, self._settings.keep_last)
        times = request.measure_times(stall_s)
        self.last_duration_s = times.seconds
        self.newest = request.checkpoint_name
        self._unreported_events.append(
            saved_event(
                step,
                request.checkpoint_name,
                times=times,
                size_bytes=size_bytes,
                removed=removed,
            )
        )

    def _note_failure(
        self, request: SaveRequest, error: Exception, *, stall_s: float | None
    ) -> None:
        """Queue the event of this failed save.

        If the disk is full, first remove older checkpoints, as the next save needs
        space. The newest one stays, and the newest good one.
        """
        step = request.state.step
        removed: list[str] = []
        if isinstance(error, OSError) and error.errno in _NO_SPACE_ERRORS:
            removed = self._prune(step, keep_last=1)
        self._unreported_events.append(
            save_failed_event(
                step,
                error,
                newest=self.newest,
                times=request.measure_times(stall_s),
                removed=removed,
            )
        )

    def _prune(self, step: int, keep_last: int) -> list[str]:
        """Remove old checkpoints on rank 0; other ranks do nothing.

        Returns:
            Names of the removed checkpoints.
        """
        if not self._ranks.leads:
            return []
        try:
            return prune(
                self._root,
                keep_last=keep_last,
                keep_every_steps=self._settings.keep_every_steps,
            )
        except (OSError, TrainerError) as error:
            self._unreported_events.append(not_removed_event(step, error))
            return []

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until this rank has written its share, or has failed to.

        Args:
            timeout_s: Longest wait, in seconds; None for no limit.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None

    def take_events(self) -> list[EventRow]:
        """Return the events of ended saves that no earlier call has returned."""
        events = []
        # One by one, as the thread may add an event meanwhile.
        while self._unreported_events:
            events.append(self._unreported_events.popleft())
        return events


def _host_memory_error(error: MemoryError) -> OSError:
    """Return the error that reports why host memory is too small for the copy."""
    first_line, _, _ = str(error).partition("\n")
    return OSError(
        errno.ENOMEM,
        "host memory is too small for a copy of the state:"
        f" {first_line[:_MAX_REASON_LENGTH]}",
    )
