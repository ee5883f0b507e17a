"""Saves the state of training while training goes on: a copy in host memory, written by a thread.

The step that follows a save waits for the copy only. A disk that is full, or a quota, ends the save and not the
training: what was saved before stays, and the loop is told.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.build import Training
from trainer.checkpoint import CheckpointWriter, checkpoint_name, prune
from trainer.config import CheckpointSettings
from trainer.events import utc_now
from trainer.manifest import TrainingState
from trainer.parallel import Ranks
from trainer.snapshot import Held, HostCopy, held_tensors, make_state

_LOWEST_PRIORITY = 19
"""The thread's, where nobody waits for it: on a busy machine the training comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save went on this rank."""

    step: int
    name: str
    stall_s: float
    """What training waited for it."""
    seconds: float
    """From its beginning until it was on the disk."""
    size_bytes: int
    """Of this rank's file."""
    error: str | None = None
    """What went wrong; then there is no such checkpoint."""
    removed: Sequence[str] = ()
    """Older checkpoints that were removed after it."""


class Saver:
    """Keeps the checkpoints of a run.

    Args:
        root: The directory of all of them, on a file system that all ranks see where several write.
        settings: What is kept.
        training: Whose state is saved.
        ranks: All of them; each makes one of these, and calls it at the same steps.
        attempt: Number of the run's start.
        timeout_s: How long ranks wait for each other's shares.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSettings,
        training: Training,
        ranks: Ranks,
        *,
        attempt: int,
        timeout_s: float,
    ) -> None:
        self._root, self._settings, self._training, self._ranks = root, settings, training, ranks
        self._attempt, self._timeout_s = attempt, timeout_s
        self._copy: HostCopy | None = None
        self._room: threading.Thread | None = None
        self._writers: Sequence[int] | None = None
        self._thread: threading.Thread | None = None
        self._finished: list[Saved] = []

    def prepare(self) -> None:
        """Begin to take the room for the copy, so that the first save need not wait for it."""
        make_state(self._training)  # before the first step there is none
        kept = self._kept()
        if kept:
            self._room = threading.Thread(target=self._take_room, args=(kept,), name="saver's room", daemon=True)
            self._room.start()

    def _take_room(self, kept: Sequence[Held]) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)  # a thread begins with the first one
        with contextlib.suppress(MemoryError, RuntimeError):  # said by the save that then tries again
            self._copy = self._new_copy(kept)

    def _kept(self) -> list[Held]:
        return [one for one in held_tensors(self._training, self._ranks) if one.keeper]

    def _new_copy(self, kept: Sequence[Held]) -> HostCopy:
        pinned = self._ranks.device.type == "cuda"
        return HostCopy(kept, f"rank-{self._ranks.rank:05d}.safetensors", pinned=pinned)

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state: TrainingState, *, rollbacks: int, wait: bool = False) -> None:
        """Save the state as it is now; all ranks call it after the same step.

        Args:
            state: What is not a tensor.
            rollbacks: Of the run so far.
            wait: Return only when it is written.
        """
        began_s = time.perf_counter()
        self.wait()
        make_state(self._training)
        kept = self._kept()
        if self._writers is None:
            self._writers = [rank for rank, has in enumerate(self._ranks.each(float(bool(kept)))) if has]
        if not kept:
            return
        copy = self._copied(kept)
        name = checkpoint_name(state.step, rollbacks)
        writer = CheckpointWriter(
            self._root,
            name,
            attempt=self._attempt,
            rank=self._ranks.rank,
            writers=self._writers,
            timeout_s=self._timeout_s,
        )
        wait = wait or not self._settings.asynchronous
        stall_s = None if wait else time.perf_counter() - began_s
        self._thread = threading.Thread(
            target=self._write,
            args=(writer, copy, state),
            kwargs={"name": name, "began_s": began_s, "stall_s": stall_s},
            name="saver",
            daemon=True,
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the save that is under way has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_finished(self) -> list[Saved]:
        """Saves that have ended since the last call, on this rank."""
        finished, self._finished = self._finished, []
        return finished

    def _copied(self, kept: Sequence[Held]) -> HostCopy:
        if self._room is not None:
            self._room.join()
            self._room = None
        if self._copy is None:
            self._copy = self._new_copy(kept)
        self._copy.take(kept)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._copy

    def _write(
        self,
        writer: CheckpointWriter,
        copy: HostCopy,
        state: TrainingState,
        *,
        name: str,
        began_s: float,
        stall_s: float | None,
    ) -> None:
        if stall_s is not None:  # nobody waits
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        error: str | None = None
        removed: list[str] = []
        try:
            writer.write(copy.content, copy.tensors, state, utc_now())
            if self._ranks.leads:
                removed = prune(
                    self._root,
                    keep_last=self._settings.keep_last,
                    keep_every_steps=self._settings.keep_every_steps,
                )
        except OSError as problem:  # a timeout of other ranks is one, too
            error = problem.strerror or str(problem)
        seconds = time.perf_counter() - began_s
        self._finished.append(
            Saved(
                step=state.step,
                name=name,
                stall_s=seconds if stall_s is None else stall_s,
                seconds=seconds,
                size_bytes=copy.size_bytes,
                error=error,
                removed=removed,
            )
        )
