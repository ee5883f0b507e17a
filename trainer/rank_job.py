"""Job of one rank: stage, train, record the exit, and leave with the other ranks.

Importing this module does not import torch: methods do, once the input is checked.
"""

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import Start
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.config.resolve import ResolvedConfig
from trainer.failure_notes import FailureNote, publish_failure, read_failure
from trainer.formats.errors import (
    DeviceOutOfMemory,
    RanksLost,
    TrainerError,
    error_text,
)
from trainer.formats.progress import progress
from trainer.formats.run_record import RunExit, read_exit
from trainer.health.signals import end_with_parent
from trainer.health.watchdog import REQUEUE, Watchdog
from trainer.record.show_row import show_row
from trainer.record.start_clock import StartClock
from trainer.record.writer import RunWriter
from trainer.runtime.garbage_collection import collection_paused
from trainer.staging.stage import stage_data

_CAUSE_WAIT_S = 5.0
"""Longest time, in seconds, for which a rank that lost another rank waits for the exit
that the other one records."""
_CAUSE_POLL_S = 0.1
"""Interval at which the waiting rank looks for that exit, in seconds."""
_LAST_WAIT_S = 60.0
"""Longest time, in seconds, for which rank 0 waits for the other ranks after its last
write. It is shorter than the timeout of training, as nothing is left to be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Error that ended training on this rank, as the console shows it."""

    exit_code: int
    reason: str
    next_step: str
    docs: str | None
    """Section of ``docs/faq.md`` that explains the error; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedRun:
    """Run that rank 0 has opened, as rank 0 broadcasts it to the other ranks."""

    directory: Path
    attempt: int
    """Number of this start of the run, counted from 1."""
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """End of a rank's job, which its process reports before it exits."""

    exit_code: int
    reason: str
    left_together: bool
    """False if some rank did not reach the end of training. Threads of the process
    group may then wait for that rank forever."""


@dataclass(kw_only=True)
class RankJob:
    """Job of one rank, from its imports to its exit code."""

    resolved: ResolvedConfig
    rank: int
    writer: RunWriter | None
    """Writer of the run record; None on ranks other than 0 until rank 0 has broadcast
    the run directory."""
    start: Start
    """Checkpoint to start from; on ranks other than 0, replaced by that of rank 0."""
    clock: StartClock
    """Clock that began with this process."""
    _watchdog: Watchdog = field(init=False)
    """Watchdog of this rank, which ``run`` starts."""

    def prepare(self) -> None:
        """Import torch and the training loop, and stage the dataset."""
        # Imported now, so that its seconds count as the phase "import". Bad input has
        # been reported before.
        with collection_paused():
            import trainer.loop  # noqa: F401
        self.clock.ended("import")
        if self.resolved.config.data.stage_to is not None:
            with progress("stage") as update:
                self.resolved = stage_data(self.resolved, update=update)
        self.clock.ended("staging")

    def run(self) -> JobEnd:
        """Join the process group, train, and record the exit; call ``prepare`` before.

        Errors of training become part of the result.
        """
        self._start_watchdog()
        outcome = self._train_or_explain()
        if isinstance(outcome, RunExit):
            end = self._finish(outcome)
        else:
            end = self._fail(outcome)
        self._watchdog.stop()
        return end

    def _start_watchdog(self) -> None:
        """Start the watchdog, which from now on handles signals too."""
        from trainer.runtime.ranks import process_group_timeout_s

        # Until all ranks have joined the process group, one may still be staging its
        # data.
        self._watchdog = Watchdog(
            timeout_s=process_group_timeout_s(self.resolved.config),
            record=self._record_watchdog_exit,
        )
        self._watchdog.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()

    def _train_or_explain(self) -> RunExit | _Failure:
        """Train, and turn any error into a failure with a next step."""
        from trainer.distributed.rank_errors import is_lost_rank_error
        from trainer.health.failures import explain

        try:
            return self._train()
        except TrainerError as error:
            return _Failure(
                exit_code=error.exit_code,
                reason=error.message,
                next_step=error.next_step,
                docs=error.docs,
            )
        except Exception as error:  # noqa: BLE001 - the border: the record and the other ranks learn of any error
            lost = is_lost_rank_error(error, rehearsed=self.clock.rehearsed)
            explanation = explain(error, lost=lost)
            docs = None
            if explanation.exit_code == DeviceOutOfMemory.exit_code:
                # The next step needs no traceback.
                docs = DeviceOutOfMemory.docs
            else:
                self._save_traceback()
            return _Failure(
                exit_code=explanation.exit_code,
                reason=explanation.reason,
                next_step=explanation.next_step,
                docs=docs,
            )

    def _train(self) -> RunExit:
        """Join the process group and train, unless the run has finished before."""
        from trainer.loop import train
        from trainer.runtime.ranks import join_ranks

        ranks = join_ranks(self.resolved.config)
        writer = self._receive_run(ranks.broadcast_object)
        self._watchdog.timeout_s = self.resolved.config.parallel.timeout_s
        self._watchdog.heartbeat()
        self.clock.ended("process_group")
        finished = self.start.finished
        if finished is not None:
            if self.rank == 0:
                sys.stderr.write(
                    f"train: nothing to do: the run finished at step {finished.steps}\n"
                )
            return finished
        with progress("train") as update:
            return train(
                self.resolved,
                ranks,
                writer,
                functools.partial(show_row, update, self.resolved.config.max_steps),
                start=self.start,
                watchdog=self._watchdog,
                clock=self.clock,
                environment=os.environ,
            )

    def _receive_run(self, broadcast: Callable[[Any], Any]) -> RunWriter:
        """Receive the run directory and the checkpoint, which rank 0 broadcasts.

        Paths are sent as absolute ones, as ranks may differ in their working directory.

        Args:
            broadcast: Collective that returns rank 0's argument on every rank.

        Returns:
            The writer of the run record; only rank 0's writes records.
        """
        run = None
        if self.writer is not None:
            start = self.start
            if start.checkpoint is not None:
                start = replace(start, checkpoint=start.checkpoint.absolute())
            run = _OpenedRun(
                directory=self.writer.directory.absolute(),
                attempt=self.writer.attempt,
                start=start,
            )
        opened_run: _OpenedRun = broadcast(run)
        if self.writer is None:  # not rank 0
            self.start = opened_run.start
            self.writer = RunWriter(opened_run.directory, records=False)
            self.writer.attempt = opened_run.attempt
        self._watchdog.traceback_file = (
            self.writer.directory / f"rank-{self.rank:05d}.traceback.txt"
        )
        return self.writer

    def _finish(self, run_exit: RunExit) -> JobEnd:
        """Record on rank 0 how training ended, and leave with the other ranks."""
        if self.rank == 0 and self.writer is not None:
            with _disk_errors_reported():
                self.writer.finish(run_exit)
        return self._leave_together(run_exit)

    def _leave_together(self, run_exit: RunExit) -> JobEnd:
        """Wait for the other ranks to finish, and leave the process group.

        The watchdog limits the wait.
        """
        from trainer.health.failures import explain
        from trainer.runtime.ranks import leave_ranks

        timeout_s = self._watchdog.timeout_s
        if self.rank == 0:
            timeout_s = min(_LAST_WAIT_S, timeout_s)
        self._watchdog.end_within(timeout_s)
        try:
            leave_ranks(together=True)
        except RuntimeError as error:
            explanation = explain(error, lost=True)
            exit_code = self._record_failure(
                FailureNote(exit_code=RanksLost.exit_code, reason=explanation.reason)
            )
            next_step = explanation.next_step
            if exit_code == 0:  # rank 0 has recorded that training finished
                next_step = "Nothing: the run is finished."
            message = f"rank {self.rank}: after the last step, {explanation.reason}"
            sys.stderr.write(error_text(message, next_step, RanksLost.docs))
            return JobEnd(
                exit_code=exit_code, reason=run_exit.reason, left_together=False
            )
        return JobEnd(
            exit_code=run_exit.exit_code, reason=run_exit.reason, left_together=True
        )

    def _fail(self, failure: _Failure) -> JobEnd:
        """Report and record a failure; the other ranks are not waited for."""
        message = f"rank {self.rank}: {failure.reason}"
        sys.stderr.write(error_text(message, failure.next_step, failure.docs))
        exit_code = self._record_failure(
            FailureNote(exit_code=failure.exit_code, reason=failure.reason)
        )
        return JobEnd(exit_code=exit_code, reason=failure.reason, left_together=False)

    def _record_failure(self, failure: FailureNote) -> int:
        """Record a failure of this rank, and return the exit code for its process.

        A rank that lost another one first waits for the other's record. If there is
        one, it is the cause: its exit code is returned, and nothing is recorded.
        """
        if self.writer is None:
            # The run directory is unknown here, but rank 0 can record the failure.
            reason = f"rank {self.rank}: {failure.reason}"
            publish_failure(os.environ, failure.exit_code, reason)
            return failure.exit_code
        if failure.exit_code == RanksLost.exit_code:
            cause = _wait_for_exit(self.writer.directory)
            if cause is not None:
                return cause.exit_code
        write_failure(self.writer, failure, self.clock, steps=self._watchdog.step)
        return failure.exit_code

    def _record_watchdog_exit(self, reason: str, step: int, *, is_likely: bool) -> None:
        """Record the reason for which the watchdog ends this rank, or likely will.

        If another rank failed before training, this process ends at once.

        Args:
            reason: Reason for the end.
            step: Number of finished steps.
            is_likely: True if the rank may still end in another way.
        """
        if self.writer is None:
            return
        recorded = read_exit(self.writer.directory)
        if recorded is not None:
            # A rank has recorded an exit. It stays, unless it only asks for a requeue
            # and this rank knows better why.
            is_certain = not is_likely and not self._watchdog.ending
            if recorded.exit_code != REQUEUE or not is_certain:
                return
        cause = None
        if step == 0:
            # A rank that failed before training has no writer, but left a note.
            cause = read_failure(os.environ)
        if cause is None:
            own_failure = FailureNote(
                exit_code=REQUEUE, reason=f"rank {self.rank}: {reason}"
            )
            write_failure(self.writer, own_failure, self.clock, steps=step)
            return
        write_failure(self.writer, cause, self.clock, steps=step)
        sys.stderr.write(f"error: {cause.reason}\n")
        sys.stderr.flush()
        # Exit now: the main thread would wait for the rank that is gone.
        os._exit(cause.exit_code)

    def _save_traceback(self) -> None:
        """Write the traceback of the current error to standard error and its file."""
        text = traceback.format_exc()
        sys.stderr.write(f"rank {self.rank}: {text}")
        file = self._watchdog.traceback_file
        if file is None:
            return
        try:
            file.write_text(text)
        except OSError as error:
            sys.stderr.write(f"cannot save the traceback to {file}: {error.strerror}\n")


def _wait_for_exit(run_directory: Path) -> RunExit | None:
    """Wait up to ``_CAUSE_WAIT_S`` for another rank to record its exit.

    Returns:
        That exit; None if no rank has recorded one.
    """
    deadline_s = time.monotonic() + _CAUSE_WAIT_S
    while time.monotonic() < deadline_s:
        recorded = read_exit(run_directory)
        if recorded is not None:
            return recorded
        time.sleep(_CAUSE_POLL_S)
    return None


def write_failure(
    writer: RunWriter, failure: FailureNote, clock: StartClock, *, steps: int = 0
) -> None:
    """Write the ``exit.json`` of a run that failed.

    A disk error is reported on the console, but not raised.

    Args:
        writer: Writer of the run record.
        failure: Exit code and reason.
        clock: Clock that began with this process.
        steps: Number of finished steps.
    """
    with _disk_errors_reported():
        checkpoints = list_checkpoints(writer.directory / CHECKPOINTS_DIRECTORY)
        newest = checkpoints[0].name if checkpoints else None
        writer.finish(clock.exit(failure.exit_code, failure.reason, steps, newest))


@contextlib.contextmanager
def _disk_errors_reported() -> Iterator[None]:
    """Report a disk error on the console; the block writes ``exit.json``."""
    try:
        yield
    except OSError as error:
        message = f"cannot write exit.json: {error.strerror}"
        sys.stderr.write(error_text(message, "Check the disk of the run."))
