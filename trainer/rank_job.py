"""Job of one rank: stage, train, record the exit, and leave with the other ranks.

Importing this module does not import torch: methods do, once the input is checked.
"""

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, list_checkpoints
from trainer.checkpoint.resume import Start
from trainer.config.resolve import ResolvedConfig
from trainer.errors import DeviceOutOfMemory, RanksLost, TrainerError, error_text
from trainer.failure_notes import publish_failure, read_failure
from trainer.health.signals import end_with_parent
from trainer.health.watchdog import REQUEUE, Watchdog
from trainer.record.progress import progress, show_row
from trainer.record.run_record import RunExit, read_exit
from trainer.record.start_clock import StartClock
from trainer.record.writer import RunWriter
from trainer.staging.stage import stage_data

_CAUSE_WAIT_S = 5.0
"""Longest wait of a rank that lost another for that rank to record its exit, in
seconds."""
_LAST_WAIT_S = 60.0
"""Longest wait of rank 0, which has nothing left to write, for the other ranks to
finish, in seconds."""
_POLL_S = 0.1
"""Interval at which a rank looks for that exit, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How training ended on this rank."""

    exit_code: int
    reason: str
    next_step: str = ""
    docs: str | None = None
    """Section of ``docs/faq.md`` that explains an error."""
    ending: RunExit | None = None
    """Exit that the training loop returned; None if an error ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedRun:
    """Run that rank 0 has opened, as it tells the other ranks."""

    directory: Path
    attempt: int
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """End of a rank's job, which its process reports before it exits."""

    exit_code: int
    reason: str
    left_together: bool
    """False if some rank did not come to the end: threads of the process group may then
    wait for it forever."""


@dataclass(kw_only=True)
class RankJob:
    """Job of one rank, from its imports to its exit code."""

    resolved: ResolvedConfig
    rank: int
    writer: RunWriter | None
    """Writer of the run record; None on ranks other than 0 until rank 0 has broadcast
    the run directory."""
    start: Start
    clock: StartClock

    def prepare(self) -> None:
        """Import torch and the training loop, and stage the dataset."""
        # The import takes seconds: bad input has been reported by now.
        import trainer.loop  # noqa: F401

        self.clock.ended("import")
        if self.resolved.config.data.stage_to is not None:
            with progress("stage") as update:
                self.resolved = stage_data(self.resolved, update=update)
        self.clock.ended("staging")

    def run(self) -> JobEnd:
        """Join the process group and train."""
        self._start_watchdog()
        outcome = self._train_or_explain()
        if outcome.exit_code not in (0, REQUEUE) or outcome.next_step:
            message = f"rank {self.rank}: {outcome.reason}"
            sys.stderr.write(error_text(message, outcome.next_step, outcome.docs))
        exit_code = self._record_exit(outcome.exit_code, outcome.reason, outcome.ending)
        left_together = False
        if outcome.ending is not None:
            exit_code, left_together = self._leave_together(exit_code)
        self._watchdog.stop()
        return JobEnd(
            exit_code=exit_code, reason=outcome.reason, left_together=left_together
        )

    def _start_watchdog(self) -> None:
        """Start the watchdog, which also handles signals from now on."""
        from trainer.distributed.ranks import process_group_timeout_s

        # Until all ranks have joined the process group, one may still be staging its
        # data.
        self._watchdog = Watchdog(
            timeout_s=process_group_timeout_s(self.resolved.config),
            record=self._record_watchdog_exit,
        )
        self._watchdog.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()

    def _train_or_explain(self) -> _Outcome:
        """Train, and turn any error into an outcome."""
        from trainer.distributed.rank_errors import is_lost_rank_error
        from trainer.health.failures import explain

        try:
            ending = self._train()
        except TrainerError as error:
            return _Outcome(
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
                docs = DeviceOutOfMemory.docs
            else:
                self._save_traceback()
            return _Outcome(
                exit_code=explanation.exit_code,
                reason=explanation.reason,
                next_step=explanation.next_step,
                docs=docs,
            )
        return _Outcome(exit_code=ending.exit_code, reason=ending.reason, ending=ending)

    def _train(self) -> RunExit:
        """Join the process group and train, unless the run has finished before."""
        from trainer.distributed.ranks import join_ranks
        from trainer.loop import train

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
        """Receive the run directory and the checkpoint, which rank 0 broadcasts."""
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
        if self.writer is None:
            self.start = opened_run.start
            self.writer = RunWriter(opened_run.directory, records=False)
            self.writer.attempt = opened_run.attempt
        self._watchdog.traceback_file = (
            self.writer.directory / f"rank-{self.rank:05d}.traceback.txt"
        )
        return self.writer

    def _leave_together(self, exit_code: int) -> tuple[int, bool]:
        """Wait for the other ranks, under the watchdog.

        Returns:
            The exit code, and whether all ranks came.
        """
        from trainer.distributed.ranks import leave_ranks
        from trainer.health.failures import explain

        timeout_s = self._watchdog.timeout_s
        if self.rank == 0:
            timeout_s = min(_LAST_WAIT_S, timeout_s)
        self._watchdog.end_within(timeout_s)
        try:
            leave_ranks(together=True)
        except RuntimeError as error:
            explanation = explain(error, lost=True)
            exit_code = self._record_exit(RanksLost.exit_code, explanation.reason)
            next_step = explanation.next_step
            if exit_code == 0:
                next_step = "Nothing: the run is finished."
            message = f"rank {self.rank}: after the last step, {explanation.reason}"
            sys.stderr.write(error_text(message, next_step, RanksLost.docs))
            return exit_code, False
        return exit_code, True

    def _record_exit(
        self, exit_code: int, reason: str, ending: RunExit | None = None
    ) -> int:
        """Record the exit and return its code.

        A rank that only lost another first waits for that rank's record, and takes over
        its exit code.
        """
        if self.writer is None:
            publish_failure(os.environ, exit_code, f"rank {self.rank}: {reason}")
            return exit_code
        if exit_code == RanksLost.exit_code and ending is None:
            cause = _wait_for_exit(self.writer.directory)
            if cause is not None:
                return cause.exit_code
        if self.rank == 0 or ending is None:
            write_exit(
                self.writer,
                exit_code,
                reason,
                self.clock,
                steps=self._watchdog.step,
                ending=ending,
            )
        return exit_code

    def _record_watchdog_exit(self, reason: str, step: int, is_likely: bool) -> None:
        """Record the reason for which the watchdog ends this rank, or likely will."""
        if self.writer is None:
            return
        recorded = read_exit(self.writer.directory)
        if recorded is not None and (
            is_likely or self._watchdog.ending or recorded.exit_code != REQUEUE
        ):
            return  # another rank has recorded the cause
        failure = None
        if step == 0:
            # A rank that failed before training has no writer, but left a note.
            failure = read_failure(os.environ)
        if failure is None:
            reason = f"rank {self.rank}: {reason}"
            write_exit(self.writer, REQUEUE, reason, self.clock, steps=step)
            return
        write_exit(
            self.writer, failure.exit_code, failure.reason, self.clock, steps=step
        )
        # Otherwise it would wait for a rank that is gone.
        sys.stderr.write(f"error: {failure.reason}\n")
        sys.stderr.flush()
        os._exit(failure.exit_code)

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
    """Wait a moment for another rank to record its exit.

    Returns:
        That exit; None if no rank has recorded one.
    """
    deadline_s = time.monotonic() + _CAUSE_WAIT_S
    while time.monotonic() < deadline_s:
        recorded = read_exit(run_directory)
        if recorded is not None:
            return recorded
        time.sleep(_POLL_S)
    return None


def write_exit(
    writer: RunWriter,
    exit_code: int,
    reason: str,
    clock: StartClock,
    *,
    steps: int = 0,
    ending: RunExit | None = None,
) -> None:
    """Write ``exit.json`` from ``ending``, or else from the other values.

    A disk error is reported, but not raised.
    """
    try:
        checkpoints = list_checkpoints(writer.directory / CHECKPOINTS_DIRECTORY)
        newest = checkpoints[0].name if checkpoints else None
        writer.finish(ending or clock.exit(exit_code, reason, steps, newest))
    except OSError as error:
        message = f"cannot write exit.json: {error.strerror}"
        sys.stderr.write(error_text(message, "Check the disk of the run."))
