"""When the state of training is saved, what goes into a checkpoint, and how it comes back."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.build import Training
from trainer.checkpoint import CHECKPOINTS_DIRECTORY, newest_checkpoint
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed
from trainer.events import EventRow, happened
from trainer.manifest import Manifest, TrainingState, manifest_text, parse_manifest
from trainer.parallel import Ranks
from trainer.saver import Saved, Saver
from trainer.snapshot import restore

_ROUND_S = 0.5
"""How often ranks that wait for a save tell each other so."""
_ABANDONED_S = 20.0
"""torchrun kills what has not left 30 s after it asked."""
_ASSUMED_BYTES_PER_S = 100e6
"""Of a disk that nothing was written to yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodCheckpoint:
    """One that a rollback returns to."""

    path: Path
    manifest: Manifest


class Keeper:
    """Saves and restores a run.

    Args:
        directory: Of the run.
        config: Says when, and how much is kept.
        training: Whose state it is.
        ranks: All of them; each has one of these, and calls it at the same steps.
        attempt: Number of the run's start.
        tell_event: Where events go.
        progressed: Called as long as something is written or read.
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
        self._progressed = progressed
        self._saver = Saver(
            self._root,
            self._settings,
            training,
            ranks,
            attempt=attempt,
            # Before the process group's own limit, so that a rank that waits here can still say for whom.
            timeout_s=config.parallel.timeout_s / 2,
            progressed=progressed,
        )
        if self.enabled:
            self._saver.prepare()
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
        return self.enabled and waited_s >= self._settings.interval_s and not self._saver.busy

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
        self._saver.begin(state, rollbacks=rollbacks, urgent=urgent)
        if urgent:
            self.wait()

    def tell_finished(self) -> None:
        """Make events of the saves that have ended."""
        for saved in self._saver.take_finished():
            if saved.error is None:
                self._seconds = saved.seconds
                self.newest, self.saved_step = saved.name, saved.step
            self._tell_event(_event(saved, self.newest))
            if saved.not_removed is not None:
                self._tell_event(_not_removed(saved))

    def wait(self) -> None:
        """Until nothing is being written, on any rank; in rounds, as a save may take longer than ranks wait."""
        busy = True
        while busy:
            self._saver.wait(_ROUND_S)
            (busy_ranks,) = self._ranks.sum(float(self._saver.busy))
            busy = busy_ranks > 0
            if not self._saver.busy:
                self._progressed()  # of a rank that writes, the writing itself is the sign of life
        self._saver.wait()
        self.tell_finished()

    def abandon(self) -> None:
        """Let a save that is under way end, for a while: other ranks are gone, and this one is about to go."""
        self._saver.wait(_ABANDONED_S)
        self.tell_finished()

    def has_saved(self, step: int) -> bool:
        """Whether the state after a step is saved, as the first rank knows it; all ranks ask together."""
        return bool(self._ranks.tell_number(float(self.saved_step == step)))

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Put a checkpoint's tensors into the training."""
        restore(self._training, path, manifest, self._ranks, progressed=self._progressed)
        self.at_step = manifest.state.step
        if self.owns(path):
            self.newest, self.saved_step = path.name, manifest.state.step

    def newest_good(self) -> GoodCheckpoint:
        """What a rollback returns to: the first rank looks, and tells all.

        Raises:
            TrainingFailed: If there is none.
        """
        self.wait()
        told = self._ranks.tell(json.dumps(self._find_good()) if self._ranks.leads else "")
        found = json.loads(told)
        if found is None:
            raise TrainingFailed(
                "training would have to roll back, and there is no good checkpoint to return to",
                next_step="Lower train.learning_rate or lengthen train.warmup_steps; "
                "save more often with train.checkpoint.interval_steps.",
            )
        path, text = found
        return GoodCheckpoint(path=Path(path), manifest=parse_manifest(json.loads(text), path))

    def _find_good(self) -> tuple[str, str] | None:
        found = newest_checkpoint(self._root, damaged=self._damaged, good=True)
        return None if found is None else (str(found[0]), manifest_text(found[1]))

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


def _event(saved: Saved, newest: str | None) -> EventRow:
    values = {"stall_s": saved.stall_s, "seconds": saved.seconds, "size_bytes": saved.size_bytes}
    removed = f"; removed {', '.join(saved.removed)}" if saved.removed else ""
    if saved.error is None:
        return happened(saved.step, "saved", f"saved {saved.name}{removed}", values=values)
    kept = f"the newest checkpoint is still {newest}" if newest else "there is no checkpoint yet"
    return happened(
        saved.step,
        "save_failed",
        f"could not save step {saved.step}: {saved.error}; {kept}, and training goes on{removed}",
        level="error",
        causes=["the disk or a quota is full", "the file system failed, or cannot be reached"],
        next_step="Free room, or raise the quota: the next save is tried as usual. Until then a crash loses more.",
        values=values,
    )


def _not_removed(saved: Saved) -> EventRow:
    return happened(
        saved.step,
        "not_removed",
        f"older checkpoints could not be removed: {saved.not_removed}",
        level="warning",
        next_step="Remove them by hand, or let this user do so: they fill the disk.",
    )
