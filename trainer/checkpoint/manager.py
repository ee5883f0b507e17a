"""Saving and restoring the training state: it is copied to host memory, and a thread writes the copy to disk.

The step after a save waits only for the copy. If the disk or a quota is full, the save
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
from pathlib import Path

import torch

from trainer.build import Training
from trainer.checkpoint import format as disk
from trainer.checkpoint.format import CheckpointManifest, TrainingState
from trainer.checkpoint.tensors import (
    HostCopy,
    TensorShard,
    make_state,
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
        self._settings, self.enabled = config.checkpoint, config.checkpoint.enabled
        self._training, self._ranks, self._tell_event = training, ranks, report_event
        self._attempt, self._progressed = attempt, progressed
        # Below the process group's timeout, so that a waiting rank can still report
        # which rank is late.
        self._timeout_s = config.parallel.timeout_s / 2
        self._saves = 0
        self._copy: HostCopy | None = None
        self._room: threading.Thread | None = None
        self._writers: Sequence[int] = ()
        self._thread: threading.Thread | None = None
        self._finished: deque[EventRow] = deque()
        """Events of finished saves that were not reported yet."""
        self._last_s = time.monotonic()
        self.save_s = (
            1.0 + state_bytes(training) / _ASSUMED_BYTES_PER_S if self.enabled else 0.0
        )
        """Duration of the last save, in seconds; an estimate before the first."""
        self.newest: str | None = None
        """Name of the newest checkpoint that this rank knows of."""
        self.at_step: int | None = None
        """Step of the last state that was restored, or that a save was attempted
        for."""
        # Allocated now, so that the first save does not wait.
        if self.enabled and (kept := self._kept()):
            self._room = threading.Thread(
                target=self._take_room,
                args=(kept,),
                name="checkpoint buffers",
                daemon=True,
            )
            self._room.start()

    def owns(self, path: Path) -> bool:
        """Return whether a checkpoint belongs to this run."""
        return path.parent.resolve() == self._root.resolve()

    @property
    def busy(self) -> bool:
        """True while this rank writes a save."""
        return self._thread is not None and self._thread.is_alive()

    def is_due_by_time(self) -> bool:
        """Return whether the save interval has passed on this rank's clock, and no save is being written."""
        return (
            self.enabled
            and time.monotonic() - self._last_s >= self._settings.interval_s
            and not self.busy
        )

    def is_due(self, step: int, asked_at: int | None) -> bool:
        """Return whether to save after a step: its number is due, or rank 0 asked for it since the last save."""
        multiples = (self._settings.interval_steps, self._settings.keep_every_steps)
        by_number = self.enabled and any(
            of is not None and step % of == 0 for of in multiples
        )
        return by_number or (
            asked_at is not None and (self.at_step is None or asked_at > self.at_step)
        )

    def _take_room(self, kept: Sequence[TensorShard]) -> None:
        if self._ranks.device.type == "cuda":
            # A thread begins with the first one.
            torch.cuda.set_device(self._ranks.device)
        # The save tries again and reports the error.
        with contextlib.suppress(MemoryError, RuntimeError):
            self._copy = self._new_copy(kept)

    def _kept(self) -> list[TensorShard]:
        """Return the tensors that this rank writes.

        This creates the optimizer's state if needed.
        """
        make_state(self._training)
        return [
            one for one in tensor_shards(self._training, self._ranks) if one.saved_here
        ]

    def _new_copy(self, kept: Sequence[TensorShard]) -> HostCopy:
        pinned = self._ranks.device.type == "cuda"
        return HostCopy(kept, f"rank-{self._ranks.rank:05d}.safetensors", pinned=pinned)

    def save(self, state: TrainingState, *, rollbacks: int, wait: bool = False) -> None:
        """Start a save.

        All ranks call it after the same step. ``wait`` also waits until it has
        succeeded or failed.
        """
        urgent = wait or not self._settings.asynchronous
        self._last_s, began_s, self.at_step = (
            time.monotonic(),
            time.perf_counter(),
            state.step,
        )
        self._join()
        kept = self._kept()
        if not self._writers:
            self._writers = [
                rank
                for rank, has in enumerate(
                    self._ranks.all_gather_float(float(bool(kept)))
                )
                if has
            ]
        if kept:
            self._begin(
                kept,
                state,
                disk.checkpoint_name(state.step, rollbacks),
                began_s,
                urgent=urgent,
            )
        if urgent:
            self.wait()

    def _begin(
        self,
        kept: list[TensorShard],
        state: TrainingState,
        name: str,
        began_s: float,
        *,
        urgent: bool,
    ) -> None:
        self._saves += 1
        writer = disk.CheckpointWriter(
            self._root,
            name,
            attempt=self._attempt,
            rank=self._ranks.rank,
            writers=self._writers,
            timeout_s=self._timeout_s,
            number=self._saves,
            progressed=self._progressed,
        )
        try:
            if self._room is not None:
                self._room.join()
                self._room = None
            self._copy = self._copy or self._new_copy(kept)
            self._copy.take(kept)
            if self._ranks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        except (MemoryError, RuntimeError) as error:
            writer.give_up(error)
            why = (
                "host memory is too small for a copy of the state:"
                f" {str(error).partition(chr(10))[0][:200]}"
            )
            self._end(
                state.step,
                name,
                began_s,
                None,
                size=0,
                problem=OSError(errno.ENOMEM, why),
            )
            return
        known = (
            writer,
            self._copy,
            state,
            began_s,
            None if urgent else time.perf_counter() - began_s,
        )
        self._thread = threading.Thread(
            target=self._write, args=known, name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def _join(self, within_s: float | None = None) -> None:
        """Wait until this rank's save has ended, for at most ``within_s``."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None

    def _write(
        self,
        writer: disk.CheckpointWriter,
        copy: HostCopy,
        state: TrainingState,
        began_s: float,
        stall_s: float | None,
    ) -> None:
        if stall_s is not None:  # training does not wait for this save
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        size, problem = len(copy.content), None
        try:
            writer.write(copy.content, copy.tensors, state)
        except Exception as error:  # noqa: BLE001 - border of this thread: training continues after any error, which is reported
            writer.give_up(error)
            size, problem = 0, error
        self._end(state.step, writer.name, began_s, stall_s, size=size, problem=problem)

    def _end(
        self,
        step: int,
        name: str,
        began_s: float,
        stall_s: float | None,
        *,
        size: int,
        problem: Exception | None,
    ) -> None:
        """Remove old checkpoints, and queue the event of this save."""
        full = isinstance(problem, OSError) and problem.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
        )
        removed: list[str] = []
        if self._ranks.leads and (full or problem is None):
            keep_last = 1 if full else self._settings.keep_last
            try:
                removed = disk.prune(
                    self._root,
                    keep_last=keep_last,
                    keep_every_steps=self._settings.keep_every_steps,
                )
            except (OSError, TrainerError) as refused:
                message = f"cannot remove older checkpoints: {refused}"
                next_step = (
                    "Remove them, or grant this user permission; otherwise they fill"
                    " the disk."
                )
                self._finished.append(
                    new_event(
                        step,
                        "not_removed",
                        message,
                        level="warning",
                        next_step=next_step,
                    )
                )
        seconds = time.perf_counter() - began_s
        values = {
            "stall_s": seconds if stall_s is None else stall_s,
            "seconds": seconds,
            "size_bytes": size,
        }
        told = f"; removed {', '.join(removed)}" if removed else ""
        if problem is None:
            self.save_s, self.newest = seconds, name
            self._finished.append(
                new_event(step, "saved", f"saved {name}{told}", values=values)
            )
            return
        why = (
            getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}"
        )
        kept = (
            f"the newest checkpoint is still {self.newest}"
            if self.newest
            else "no checkpoint exists yet"
        )
        message = f"cannot save step {step}: {why}; {kept}; training continues{told}"
        causes = [
            "the disk or a quota is full",
            "the file system failed or is unreachable",
        ]
        next_step = (
            "Free disk space or raise the quota before the next save; a crash until"
            " then loses more work."
        )
        told_more = {"level": "error", "causes": causes, "next_step": next_step}
        self._finished.append(
            new_event(step, "save_failed", message, values=values, **told_more)
        )

    def report_finished(self) -> None:
        """Report the events of finished saves."""
        while self._finished:  # the thread may add one meanwhile
            self._tell_event(self._finished.popleft())

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
        """Wait a limited time for a save in progress: other ranks are gone, and this one is about to exit."""
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
        self.at_step = manifest.state.step
        if self.owns(path):
            self.newest = path.name

    def newest_good(self) -> tuple[Path, CheckpointManifest]:
        """Return the newest good checkpoint, which rank 0 finds for all.

        Raises:
            TrainingFailed: If there is none.
        """
        self.wait()
        found, corrupt = (
            disk.newest_checkpoint(self._root, good=True)
            if self._ranks.leads
            else (None, [])
        )
        for passed_over, why in corrupt:
            message = f"checkpoint {passed_over.name} is corrupt and is skipped: {why}"
            self._tell_event(
                new_event(
                    0, "corrupt", message, level="error", next_step="Check that disk."
                )
            )
        found = self._ranks.broadcast_object(found)
        if found is None:
            advice = "Lower train.learning_rate or increase train.warmup_steps"
            next_step = (
                f"{advice}; save more often with train.checkpoint.interval_steps."
            )
            raise TrainingFailed(
                "cannot roll back: no good checkpoint exists", next_step=next_step
            )
        return found


def state_bytes(training: Training) -> int:
    """Return the approximate size of a checkpoint: all weights, and two optimizer values per trained weight."""
    return sum(
        one.nbytes * (3 if one.requires_grad else 1)
        for one in training.module.parameters()
    )
