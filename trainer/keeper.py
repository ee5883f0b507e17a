"""When the state of training is saved, and how it comes back: a copy in host memory, written by a thread.

The step that follows a save waits for the copy only. A disk that is full, or a quota, ends the save and not the
training: what was saved before stays, and the loop is told.
"""

import contextlib
import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.build import Training
from trainer.checkpoint import (
    CHECKPOINTS_DIRECTORY,
    CheckpointManifest,
    CheckpointWriter,
    TrainingState,
    checkpoint_name,
    manifest_text,
    newest_checkpoint,
    parse_manifest,
    prune,
)
from trainer.config import TrainConfig
from trainer.errors import TrainerError, TrainingFailed
from trainer.events import EventRow, happened, utc_now
from trainer.parallel import Ranks
from trainer.snapshot import Held, HostCopy, held_tensors, make_state, restore

_LOWEST_PRIORITY = 19
"""The thread's, where nobody waits for it: on a busy machine the training comes first."""
_ROUND_S = 0.5
"""How often ranks that wait for a save tell each other so."""
_ABANDONED_S = 20.0
"""torchrun kills what has not left 30 s after it asked."""
_ASSUMED_BYTES_PER_S = 100e6
"""Of a disk that nothing was written to yet."""


class Keeper:
    """Saves and restores a run.

    Each rank has one of these, and calls it at the same steps. ``progressed`` is called as long as something is written
    or read.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainConfig,
        training: Training,
        ranks: Ranks,
        *,
        attempt: int,
        tell_event: Callable[[EventRow], None],
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = directory / CHECKPOINTS_DIRECTORY
        self._settings = config.checkpoint
        self._training, self._ranks, self._tell_event = training, ranks, tell_event
        self._attempt, self._progressed = attempt, progressed
        # Before the process group's own limit, so that a rank that waits here can still say for whom.
        self._timeout_s = config.parallel.timeout_s / 2
        self._saves = 0
        self._copy: HostCopy | None = None
        self._room: threading.Thread | None = None
        self._writers: Sequence[int] | None = None
        self._thread: threading.Thread | None = None
        self._finished: deque[tuple[EventRow, ...]] = deque()
        """Of each save that has ended: how it went, and perhaps that older ones could not be removed."""
        if self.enabled:
            self._prepare()
        self._last_s = time.monotonic()
        self._seconds: float | None = None
        self._guessed_s = 1.0 + state_bytes(training) / _ASSUMED_BYTES_PER_S
        self.newest: str | None = None
        """The newest checkpoint, as far as this rank knows."""
        self.at_step: int | None = None
        """The step of the last state that was read, or that a save was tried of."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint, as far as this rank knows."""

    @property
    def enabled(self) -> bool:
        """Whether anything is saved at all."""
        return self._settings.enabled

    def owns(self, path: Path) -> bool:
        """Whether a checkpoint is one of this run."""
        return path.parent.resolve() == self._root.resolve()

    def is_due_by_time(self) -> bool:
        """Whether the last save is long enough ago; by this rank's clock."""
        waited_s = time.monotonic() - self._last_s
        return self.enabled and waited_s >= self._settings.interval_s and not self.busy

    def is_due(self, step: int, asked_at: int | None) -> bool:
        """Whether to save after a step: its number asks for it, or the first rank did, and not before the last save."""
        multiples = (self._settings.interval_steps, self._settings.keep_every_steps)
        by_number = self.enabled and any(of is not None and step % of == 0 for of in multiples)
        return by_number or (asked_at is not None and (self.at_step is None or asked_at > self.at_step))

    def seconds_of_a_save(self) -> float:
        """What the next one will take: as long as the last, or a guess."""
        if not self.enabled:
            return 0.0
        return self._seconds if self._seconds is not None else self._guessed_s

    def save(self, state: TrainingState, *, rollbacks: int, wait: bool = False) -> None:
        """Save; all ranks call it after the same step. With ``wait`` it has ended, well or not, on this return."""
        self._last_s = time.monotonic()
        self.at_step = state.step
        urgent = wait or not self._settings.asynchronous
        self._begin(state, rollbacks=rollbacks, urgent=urgent)
        if urgent:
            self.wait()

    def _prepare(self) -> None:
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

    def _begin(self, state: TrainingState, *, rollbacks: int, urgent: bool) -> None:
        began_s = time.perf_counter()
        self._join()
        make_state(self._training)
        kept = self._kept()
        if self._writers is None:
            self._writers = [rank for rank, has in enumerate(self._ranks.each(float(bool(kept)))) if has]
        if not kept:
            return
        self._saves += 1
        name = checkpoint_name(state.step, rollbacks)
        writer = CheckpointWriter(
            self._root, name, attempt=self._attempt, rank=self._ranks.rank, writers=self._writers,
            timeout_s=self._timeout_s, number=self._saves, progressed=self._progressed,
        )  # fmt: skip
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
            why = f"no room for a copy of the state in host memory: {str(error).partition(chr(10))[0][:200]}"
            self._end(state.step, name, began_s, error=why)
            return
        stall_s = None if urgent else time.perf_counter() - began_s
        arguments = (writer, self._copy, state, began_s, stall_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="saver", daemon=True)
        self._thread.start()

    def _join(self, within_s: float | None = None) -> None:
        """Wait until this rank's save has ended, or so long."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None

    def _write(
        self, writer: CheckpointWriter, copy: HostCopy, state: TrainingState, began_s: float, stall_s: float | None
    ) -> None:
        if stall_s is not None:  # nothing waits for it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            writer.write(copy.content, copy.tensors, state, utc_now())
        except Exception as problem:  # noqa: BLE001 - the border of this thread: whatever it is, training goes on, and is told
            writer.give_up(problem)
            full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
            told = problem.strerror if isinstance(problem, OSError) else f"{type(problem).__name__}: {problem}"
            self._end(
                state.step, writer.name, began_s, stall_s, error=told or str(problem), prune_to=1 if full else None
            )
        else:
            keep = self._settings.keep_last
            self._end(state.step, writer.name, began_s, stall_s, size_bytes=copy.size_bytes, prune_to=keep)

    def _end(
        self,
        step: int,
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
        not_removed: tuple[EventRow, ...] = ()
        if self._ranks.leads and prune_to is not None:
            try:
                removed = prune(self._root, keep_last=prune_to, keep_every_steps=self._settings.keep_every_steps)
            except (OSError, TrainerError) as problem:
                message = f"older checkpoints could not be removed: {problem}"
                next_step = "Remove them by hand, or let this user do so: they fill the disk."
                not_removed = (happened(step, "not_removed", message, level="warning", next_step=next_step),)
        seconds = time.perf_counter() - began_s
        values = {"stall_s": seconds if stall_s is None else stall_s, "seconds": seconds, "size_bytes": size_bytes}
        told = f"; removed {', '.join(removed)}" if removed else ""
        if error is None:
            self._seconds, self.newest, self.saved_step = seconds, name, step
            saved = happened(step, "saved", f"saved {name}{told}", values=values)
        else:
            kept = f"the newest checkpoint is still {self.newest}" if self.newest else "there is no checkpoint yet"
            saved = happened(
                step,
                "save_failed",
                f"could not save step {step}: {error}; {kept}, and training goes on{told}",
                level="error",
                causes=["the disk or a quota is full", "the file system failed, or cannot be reached"],
                next_step="Free room, or raise the quota: the next save is tried as usual. Until then a crash loses "
                "more.",
                values=values,
            )
        self._finished.append((saved, *not_removed))

    def tell_finished(self) -> None:
        """Make events of the saves that have ended."""
        while self._finished:  # the thread may add one meanwhile
            for event in self._finished.popleft():
                self._tell_event(event)

    def wait(self) -> None:
        """Until nothing is being written, on any rank; in rounds, as a save may take longer than ranks wait."""
        busy = True
        while busy:
            self._join(_ROUND_S)
            (busy_ranks,) = self._ranks.sum(float(self.busy))
            busy = busy_ranks > 0
            if not self.busy:
                self._progressed()  # of a rank that writes, the writing itself is the sign of life
        self._join()
        self.tell_finished()

    def abandon(self) -> None:
        """Let a save that is under way end, for a while: other ranks are gone, and this one is about to go."""
        self._join(_ABANDONED_S)
        self.tell_finished()

    def has_saved(self, step: int) -> bool:
        """Whether the state after a step is saved, as the first rank knows it; all ranks ask together."""
        return bool(self._ranks.tell_number(float(self.saved_step == step)))

    def restore(self, path: Path, manifest: CheckpointManifest) -> None:
        """Put a checkpoint's tensors into the training."""
        restore(self._training, path, manifest, self._ranks, progressed=self._progressed)
        self.at_step = manifest.state.step
        if self.owns(path):
            self.newest, self.saved_step = path.name, manifest.state.step

    def newest_good(self) -> tuple[Path, CheckpointManifest]:
        """What a rollback returns to: the first rank looks, and tells all.

        Raises:
            TrainingFailed: If there is none.
        """
        self.wait()
        found = newest_checkpoint(self._root, damaged=self._damaged, good=True) if self._ranks.leads else None
        told = self._ranks.tell("" if found is None else json.dumps([str(found[0]), manifest_text(found[1])]))
        if not told:
            raise TrainingFailed(
                "training would have to roll back, and there is no good checkpoint to return to",
                next_step="Lower train.learning_rate or lengthen train.warmup_steps; "
                "save more often with train.checkpoint.interval_steps.",
            )
        path, text = json.loads(told)
        return Path(path), parse_manifest(json.loads(text), path)

    def _damaged(self, path: Path, why: str) -> None:
        self._tell_event(
            happened(
                0,
                "damaged",
                f"checkpoint {path.name} is damaged and was passed over: {why}",
                level="error",
                next_step="See what is wrong with that disk.",
            )
        )


def state_bytes(training: Training) -> int:
    """About what a checkpoint takes: weights, and two numbers of the optimizer for each that is trained."""
    parameters = list(training.module.parameters())
    whole = sum(one.numel() * one.element_size() for one in parameters)
    return whole + 2 * sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)
