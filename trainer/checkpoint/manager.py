"""Checkpoints of a run, which all ranks save after the same steps and restore together.

``async_writer`` writes them in the background.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.build import Training
from trainer.checkpoint.async_writer import AsyncCheckpointWriter, SaveRequest
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    CheckpointManifest,
    TrainingState,
    checkpoint_name,
    step_of,
)
from trainer.checkpoint.restore import restore
from trainer.checkpoint.save_events import corrupt_event
from trainer.checkpoint.stored_checkpoints import StoredCheckpoint, newest_checkpoint
from trainer.checkpoint.tensors import (
    TensorShard,
    make_optimizer_state,
    tensor_shards,
)
from trainer.formats.errors import TrainingFailed
from trainer.formats.events import EventRow
from trainer.formats.train_config import TrainConfig
from trainer.runtime.ranks import Ranks

_COLLECTIVE_INTERVAL_S = 0.5
"""Interval between collectives while ranks wait for a save, in seconds: far below their
timeout."""
_MAX_EXIT_WAIT_S = 20.0
"""Longest wait for a save before this rank exits after an error, in seconds; torchrun
kills ranks 30 s after SIGTERM."""
_ASSUMED_OVERHEAD_S = 1.0
"""Time that any save takes beside writing, for an estimate of the first, in seconds."""
_ASSUMED_BYTES_PER_S = 100e6
"""Speed of writing the first save, for an estimate: that of a slow disk, as a run near
its time limit keeps the estimated time for its last save."""


class CheckpointManager:
    """Saves and restores checkpoints of a run, at the same steps on every rank.

    Args:
        directory: Run directory.
        config: Configuration of training.
        training: Training whose state is saved and restored.
        ranks: This rank, and the number of all.
        attempt: Number of this start of the run, counted from 1.
        report_event: Callback that receives events of saves and corrupt checkpoints.
        progressed: Callback while a checkpoint is written or read.
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
        self._root = directory / CHECKPOINTS_DIRECTORY
        self._settings = config.checkpoint
        self.enabled = config.checkpoint.enabled
        """True if checkpoints are saved at intervals."""
        self._training = training
        self._ranks = ranks
        self._attempt = attempt
        self._report_event = report_event
        self._progressed = progressed
        self._writer = AsyncCheckpointWriter(
            self._root, config, ranks, attempt=attempt, progressed=progressed
        )
        self._writing_ranks: Sequence[int] = ()
        self._interval_began_s = time.monotonic()
        self._estimated_duration_s = 0.0
        self.last_state_step: int | None = None
        """Step of the last state that was restored, or that a save was started for;
        None before either."""
        if self.enabled:
            self._estimated_duration_s = (
                _ASSUMED_OVERHEAD_S + state_bytes(training) / _ASSUMED_BYTES_PER_S
            )
            self._writer.start_allocating(self._shards_to_save())

    @property
    def expected_duration_s(self) -> float:
        """Duration of the last save, in seconds; an estimate before the first."""
        if self._writer.last_duration_s is None:
            return self._estimated_duration_s
        return self._writer.last_duration_s

    @property
    def newest(self) -> str | None:
        """Name of the newest checkpoint that this rank knows of."""
        return self._writer.newest

    def _shards_to_save(self) -> list[TensorShard]:
        """Return the tensors that this rank writes.

        Optimizer state is created if there is none yet, so every checkpoint has it.
        """
        make_optimizer_state(self._training)
        shards = tensor_shards(self._training, self._ranks)
        return [shard for shard in shards if shard.saved_here]

    def owns(self, path: Path) -> bool:
        """Return whether the directory of a checkpoint is one of this run's."""
        return path.parent.resolve() == self._root.resolve()

    @property
    def busy(self) -> bool:
        """True while this rank writes a checkpoint."""
        return self._writer.busy

    def is_due_by_time(self) -> bool:
        """Return whether the save interval has passed on this rank's clock.

        False while a checkpoint is being written.
        """
        return (
            self.enabled
            and time.monotonic() - self._interval_began_s >= self._settings.interval_s
            and not self.busy
        )

    def is_due(self, step: int, requested_at: int | None) -> bool:
        """Return whether to save after a step, by its number or by request.

        Args:
            step: Step that has just been taken.
            requested_at: Last step at which rank 0 requested a save by its clock;
                None if it never has. A save of that step or a later one fulfils the
                request.
        """
        if self._is_due_by_number(step):
            return True
        if requested_at is None:
            return False
        return self.last_state_step is None or requested_at > self.last_state_step

    def _is_due_by_number(self, step: int) -> bool:
        """Return whether a step is a multiple of a configured interval."""
        if not self.enabled:
            return False
        intervals = (self._settings.interval_steps, self._settings.keep_every_steps)
        for interval_steps in intervals:
            if interval_steps is not None and step % interval_steps == 0:
                return True
        return False

    def save(self, state: TrainingState, *, rollbacks: int, wait: bool = False) -> None:
        """Start a save; all ranks must call it after the same step.

        A save that fails is an event, and raises no error.

        Args:
            state: State besides tensors, which are taken from the training.
            rollbacks: Number of rollbacks of the run so far.
            wait: Whether to wait until the save has succeeded or failed.
        """
        request = SaveRequest(
            state=state,
            checkpoint_name=checkpoint_name(state.step, rollbacks),
            began_s=time.perf_counter(),
            training_waits=wait or not self._settings.asynchronous,
        )
        self._interval_began_s = time.monotonic()
        self.last_state_step = state.step
        # The previous save may still be writing the copy that this one overwrites.
        self._writer.join()
        shards = self._shards_to_save()
        if not self._writing_ranks:
            # Agreed on once, as shards stay on their ranks during a run.
            self._writing_ranks = self._agree_on_writers(writes=len(shards) > 0)
        if shards:
            self._writer.start(shards, request, writing_ranks=self._writing_ranks)
        if request.training_waits:
            self.wait()

    def _agree_on_writers(self, *, writes: bool) -> list[int]:
        """Return the ranks that write a share of every checkpoint, in ascending order.

        ``writes`` tells whether this rank is one of them.
        """
        writes_by_rank = self._ranks.all_gather_float(float(writes))
        return [rank for rank, rank_writes in enumerate(writes_by_rank) if rank_writes]

    def report_finished(self) -> None:
        """Report the events of finished saves."""
        for event in self._writer.take_events():
            self._report_event(event)

    def wait(self) -> None:
        """Wait until no rank is saving, and report the events.

        All ranks must call it. They synchronise repeatedly, as a save may last longer
        than the timeout of a collective.
        """
        busy_ranks = 1.0
        while busy_ranks:
            self._writer.join(_COLLECTIVE_INTERVAL_S)
            (busy_ranks,) = self._ranks.all_reduce_sum(float(self.busy))
            if not self.busy:
                self._progressed()  # a rank that writes reports progress while writing
        self._writer.join()
        self.report_finished()

    def abandon(self) -> None:
        """Wait a limited time for a save in progress, as this rank is about to exit.

        Other ranks may be gone, so this is not a collective.
        """
        self._writer.join(_MAX_EXIT_WAIT_S)
        self.report_finished()

    def has_saved(self, step: int) -> bool:
        """Return whether rank 0's newest checkpoint is that of a step.

        All ranks must call it, as rank 0 broadcasts the answer.
        """
        is_saved = self.newest is not None and step_of(self.newest) == step
        return self._ranks.broadcast_object(is_saved)

    def restore(self, path: Path, manifest: CheckpointManifest) -> None:
        """Load a checkpoint's tensors into the training; all ranks must call it.

        Raises:
            BadConfig: If the checkpoint is of another model, or lacks a part.
        """
        restore(
            self._training, path, manifest, self._ranks, progressed=self._progressed
        )
        self.last_state_step = manifest.state.step
        if self.owns(path):
            self._writer.newest = path.name

    def newest_good(self) -> StoredCheckpoint:
        """Return the newest good checkpoint, for a rollback.

        All ranks must call it, as rank 0 finds the checkpoint and broadcasts it.

        Raises:
            TrainingFailed: If there is none.
        """
        self.wait()  # a save in progress may become the newest good one
        checkpoint: StoredCheckpoint | None = None
        if self._ranks.leads:
            checkpoint, corrupt_checkpoints = newest_checkpoint(
                self._root, only_good=True
            )
            for corrupt in corrupt_checkpoints:
                self._report_event(corrupt_event(corrupt))
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


def state_bytes(training: Training) -> int:
    """Return the approximate size of a checkpoint, in bytes.

    It holds all weights, and AdamW's two averages of each trained weight.
    """
    total_bytes = 0
    for parameter in training.module.parameters():
        values_per_weight = 3 if parameter.requires_grad else 1
        total_bytes += parameter.nbytes * values_per_weight
    return total_bytes
