"""Saves the state of training while training goes on: a copy in host memory, written by a thread.

The step that follows a save waits for the copy only. A disk that is full, or a quota, ends the save and not the
training: what was saved before stays, and the loop is told.
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
from trainer.checkpoint import CheckpointWriter, checkpoint_name, prune
from trainer.config import CheckpointSettings
from trainer.errors import TrainerError
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
    """Older checkpoints that were removed after it, or to make room for the next."""
    not_removed: str | None = None
    """Why older ones could not be removed."""


class Saver:
    """Keeps the checkpoints of a run.

    Args:
        root: The directory of all of them, on a file system that all ranks see where several write.
        settings: What is kept.
        training: Whose state is saved.
        ranks: All of them; each makes one of these, and calls it at the same steps.
        attempt: Number of the run's start.
        timeout_s: How long ranks wait for a share that does not grow.
        progressed: Called now and then, from a thread, as long as something is written.
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
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._settings, self._training, self._ranks = root, settings, training, ranks
        self._attempt, self._timeout_s, self._progressed = attempt, timeout_s, progressed
        self._saves = 0
        self._copy: HostCopy | None = None
        self._room: threading.Thread | None = None
        self._writers: Sequence[int] | None = None
        self._thread: threading.Thread | None = None
        self._finished: deque[Saved] = deque()

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
        """As ``begin``; with ``wait``, or where settings ask for it, return only when it is written."""
        urgent = wait or not self._settings.asynchronous
        self.begin(state, rollbacks=rollbacks, urgent=urgent)
        if urgent:
            self.wait()

    def begin(self, state: TrainingState, *, rollbacks: int, urgent: bool = False) -> None:
        """Save the state as it is now; all ranks call it after the same step.

        Args:
            state: What is not a tensor.
            rollbacks: Of the run so far.
            urgent: Whether training is going to wait for it.
        """
        began_s = time.perf_counter()
        self.wait()
        make_state(self._training)
        kept = self._kept()
        if self._writers is None:
            self._writers = [rank for rank, has in enumerate(self._ranks.each(float(bool(kept)))) if has]
        if not kept:
            return
        self._saves += 1
        name = checkpoint_name(state.step, rollbacks)
        writer = CheckpointWriter(
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
            copy = self._copied(kept)
        except (MemoryError, RuntimeError) as error:
            writer.give_up(error)
            why = f"no room for a copy of the state in host memory: {str(error).partition(chr(10))[0][:200]}"
            self._end(state, name, began_s, error=why)
            return
        stall_s = None if urgent else time.perf_counter() - began_s
        self._thread = threading.Thread(
            target=self._write,
            args=(writer, copy, state),
            kwargs={"name": name, "began_s": began_s, "stall_s": stall_s},
            name="saver",
            daemon=True,
        )
        self._thread.start()

    def wait(self, within_s: float | None = None) -> None:
        """Until the save that is under way has ended, or so long."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None

    def take_finished(self) -> list[Saved]:
        """Saves that have ended since the last call, on this rank."""
        found = []
        while self._finished:  # the thread may add one meanwhile
            found.append(self._finished.popleft())
        return found

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
        try:
            writer.write(copy.content, copy.tensors, state, utc_now())
        except Exception as problem:  # noqa: BLE001 - the border of this thread: whatever it is, training goes on, and is told
            writer.give_up(problem)
            full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
            told = problem.strerror if isinstance(problem, OSError) else f"{type(problem).__name__}: {problem}"
            self._end(state, name, began_s, stall_s, error=told or str(problem), prune_to=1 if full else None)
        else:
            size_bytes, keep = copy.size_bytes, self._settings.keep_last
            self._end(state, name, began_s, stall_s, size_bytes=size_bytes, prune_to=keep)

    def _end(
        self,
        state: TrainingState,
        name: str,
        began_s: float,
        stall_s: float | None = None,
        *,
        size_bytes: int = 0,
        error: str | None = None,
        prune_to: int | None = None,
    ) -> None:
        """Remove what is not to be kept any more, and note how the save went."""
        removed: list[str] = []
        not_removed: str | None = None
        if self._ranks.leads and prune_to is not None:
            try:
                removed = prune(self._root, keep_last=prune_to, keep_every_steps=self._settings.keep_every_steps)
            except (OSError, TrainerError) as problem:
                not_removed = str(problem)
        seconds = time.perf_counter() - began_s
        saved = Saved(
            step=state.step,
            name=name,
            stall_s=seconds if stall_s is None else stall_s,
            seconds=seconds,
            size_bytes=size_bytes,
            error=error,
            removed=removed,
            not_removed=not_removed,
        )
        self._finished.append(saved)
