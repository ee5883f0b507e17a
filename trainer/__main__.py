"""Command line of the trainer.

    python -m trainer PROFILE [--data DIR] [--set train.KEY=VALUE] [--out DIR]
                              [--resume auto|PATH|never]

Run it under torchrun for several ranks. ``exit.json`` in the run directory has the exit
code and reason, as torchrun itself returns 1 for any failure of its ranks.

Imports of torch wait until the profile, the dataset and the run directory are checked:
they take seconds, and bad input is reported at once.
"""

import argparse
import functools
import importlib.metadata
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, list_checkpoints
from trainer.checkpoint.resume import AUTO, NEVER, Start, choose_run
from trainer.config.resolve import ResolvedConfig, modified_text, resolve
from trainer.config.settings_text import settings_text
from trainer.data.manifest import read_manifest
from trainer.documentation import documentation_path
from trainer.environment import CPU_ENVIRONMENT
from trainer.errors import (
    DeviceOutOfMemory,
    RanksLost,
    TrainerError,
    error_text,
    permission_denied,
)
from trainer.failure_notes import publish_failure, read_failure
from trainer.health.signals import SIGNALS, end_with_parent, exit_signals
from trainer.health.watchdog import REQUEUE, Watchdog
from trainer.record.boards import check_installed
from trainer.record.progress import ignore_closed_streams, progress, show_row
from trainer.record.run_record import (
    MODEL_DIRECTORY,
    RUN_FILE,
    RunExit,
    StartClock,
    process_started_s,
    read_exit,
)
from trainer.record.writer import RunWriter
from trainer.staging.stage import stage_data

_CAUSE_WAIT_S = 5.0
"""Longest wait of a rank that lost another for that rank's own failure note, in
seconds."""
_LAST_WAIT_S = 60.0
"""Longest wait of rank 0, which has nothing left to write, for the other ranks to
finish, in seconds."""
_POLL_S = 0.1


def main() -> int:
    """Train one model from a profile; return the exit code."""
    clock = StartClock(process_started_s())
    ignore_closed_streams()
    arguments = command_line().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    # The writer of the run record, as soon as there is one: a failure while the run is
    # being opened is recorded too.
    opened_writers: list[RunWriter] = []
    try:
        # Until the watchdog handles them, they end the process cleanly.
        for number in exit_signals():
            signal.signal(number, _raise_signalled)
        resolved = resolve(
            arguments.profile,
            assignments=arguments.set,
            data=arguments.data,
            expect_sha256=arguments.expect_profile_sha256,
        )
        if resolved.config.device == "cpu":
            # Before torch is imported, which reads them.
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        writer: RunWriter | None = None
        start = Start()
        if rank == 0:
            if resolved.profile_modified:
                sys.stderr.write(modified_text(arguments.profile))
            writer, start = _open_run(arguments, resolved, clock, opened_writers.append)
            sys.stderr.write(settings_text(resolved, writer.directory / RUN_FILE))
        job = _Job(resolved, rank, writer, start, clock)
        job.prepare()
        return job.run()
    except _Signalled as signalled:
        exit_code, reason = _explain_signal(signalled.number)
        if opened_writers:
            _write_exit(opened_writers[0], exit_code, reason, clock)
        return exit_code
    except (TrainerError, PermissionError) as raised:
        error = (
            permission_denied(raised) if isinstance(raised, PermissionError) else raised
        )
        # From one rank of each node, as the cause may be only on that node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(error_text(error.message, error.next_step, error.docs))
        if rank != 0:
            publish_failure(
                os.environ, error.exit_code, f"rank {rank}: {error.message}"
            )
        if opened_writers:
            _write_exit(opened_writers[0], error.exit_code, error.message, clock)
        return error.exit_code


class _Signalled(BaseException):
    """Signal before training began.

    A ``BaseException``, so that, as with Ctrl-C, no handler on the way catches it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _raise_signalled(number: int, frame: object) -> None:
    for other in SIGNALS:  # one is enough, and another must not disturb the exit
        signal.signal(other, signal.SIG_IGN)
    raise _Signalled(number)


def _explain_signal(number: int) -> tuple[int, str]:
    """Return the exit code and reason after a signal before training began."""
    reason = f"{signal.Signals(number).name} before training began"
    sys.stderr.write(f"train: {reason}\n")
    # torchrun ends all ranks when one fails.
    failure = read_failure(os.environ)
    if failure is not None:
        return failure
    # 130 is the shell's exit code of a process that Ctrl-C ended.
    return (130 if number == signal.SIGINT else REQUEUE), reason


def _open_run(
    arguments: argparse.Namespace,
    resolved: ResolvedConfig,
    clock: StartClock,
    on_open: Callable[[RunWriter], None],
) -> tuple[RunWriter, Start]:
    """Open the run directory on rank 0, and choose the checkpoint to start from."""
    clock.ended("import")
    check_installed(resolved.config.log_to)
    if resolved.config.data.stage_to is None:
        read_manifest(resolved.data_dir)  # before a run directory is made
    writer, start = choose_run(
        arguments.out, arguments.resume, resolved, on_open=on_open
    )
    clock.ended("restore")
    return writer, start


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


@dataclass
class _Job:
    """Run of one rank, from its imports to its exit code."""

    resolved: ResolvedConfig
    rank: int
    writer: RunWriter | None
    """Writer of the run record; None on ranks other than 0 until rank 0 has broadcast
    the run directory."""
    start: Start
    clock: StartClock

    def prepare(self) -> None:
        """Import torch and the training loop, and stage the dataset."""
        # Slow: bad input has been reported by now.
        import trainer.loop  # noqa: F401

        self.clock.ended("import")
        if self.resolved.config.data.stage_to is not None:
            with progress("stage") as update:
                self.resolved = stage_data(self.resolved, update=update)
        self.clock.ended("staging")

    def run(self) -> int:
        """Join the process group and train; return the exit code."""
        from trainer.distributed.ranks import leave_ranks, process_group_timeout_s

        # Until all ranks have joined the process group, one may still be staging its
        # data.
        self._watchdog = Watchdog(
            timeout_s=process_group_timeout_s(self.resolved.config),
            record=self._record_watchdog_exit,
        )
        self._watchdog.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()

        outcome = self._train_or_explain()
        if outcome.exit_code not in (0, REQUEUE) or outcome.next_step:
            message = f"rank {self.rank}: {outcome.reason}"
            sys.stderr.write(error_text(message, outcome.next_step, outcome.docs))
        exit_code = self._record_exit(outcome.exit_code, outcome.reason, outcome.ending)
        left_together = False
        if outcome.ending is not None:
            exit_code, left_together = self._leave_together(exit_code, leave_ranks)
        self._watchdog.stop()

        if self.rank == 0 and exit_code == 0 and self.writer is not None:
            directory = self.writer.directory
            print(f"run: {directory}\nmodel: {directory / MODEL_DIRECTORY}")
        elif self.rank == 0 and exit_code == REQUEUE:
            sys.stderr.write(f"train: {outcome.reason}\n")
        if not left_together:
            # Threads of a broken process group may wait for their peers forever.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        return exit_code

    def _train_or_explain(self) -> _Outcome:
        """Train, and turn any error into an outcome."""
        from trainer.distributed.ranks import is_lost_rank_error
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
            run = (self.writer.directory.absolute(), self.writer.attempt, start)
        directory, attempt, start = broadcast(run)
        if self.writer is None:
            self.start = start
            self.writer = RunWriter(directory, active=False)
            self.writer.attempt = attempt
        self._watchdog.traceback_file = (
            self.writer.directory / f"rank-{self.rank:05d}.traceback.txt"
        )
        return self.writer

    def _leave_together(
        self, exit_code: int, leave: Callable[..., None]
    ) -> tuple[int, bool]:
        """Wait for the other ranks, under the watchdog.

        Returns:
            The exit code, and whether all ranks came.
        """
        from trainer.health.failures import explain

        timeout_s = self._watchdog.timeout_s
        if self.rank == 0:
            timeout_s = min(_LAST_WAIT_S, timeout_s)
        self._watchdog.end_within(timeout_s)
        try:
            leave(together=True)
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
            deadline_s = time.monotonic() + _CAUSE_WAIT_S
            while time.monotonic() < deadline_s:
                recorded = read_exit(self.writer.directory)
                if recorded is not None:
                    return recorded.exit_code
                time.sleep(_POLL_S)
        if self.rank == 0 or ending is None:
            _write_exit(
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
            failure = read_failure(os.environ)
        if failure is None:
            reason = f"rank {self.rank}: {reason}"
            _write_exit(self.writer, REQUEUE, reason, self.clock, steps=step)
            return
        exit_code, reason = failure
        _write_exit(self.writer, exit_code, reason, self.clock, steps=step)
        # Otherwise it would wait for a rank that is gone.
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        os._exit(exit_code)

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


def _write_exit(
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


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors have the form of all others."""

    def error(self, message: str) -> NoReturn:
        """Print an error with a next step, and exit."""
        next_step = "See: python -m trainer -h"
        if any(word.partition("=")[0] == "--profile" for word in sys.argv):
            next_step = "Name the profile without an option: python -m trainer PROFILE"
        self.exit(2, error_text(message, next_step))


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        usage="python -m trainer PROFILE [OPTIONS]",
        description="Train a masked-LM encoder from a profile.",
        epilog=(
            "Examples:\n  python -m trainer profiles/bert-mini-cpu.toml --out"
            " runs/first\n  torchrun --nproc-per-node 8 -m trainer PROFILE --set"
            " train.max_steps=1000\n\nDocs: " + documentation_path("train.md")
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "profile",
        metavar="PROFILE",
        type=Path,
        help="Profile (TOML), as autotune tune writes it.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="Dataset directory. Default: AUTOTUNE_DATA, else the profile's.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="train.KEY=VALUE",
        help="Override a setting; repeatable.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Run directory. Default: runs/<UTC>-<model>.",
    )
    parser.add_argument(
        "--resume",
        default=AUTO,
        metavar=f"{AUTO}|PATH|{NEVER}",
        help=(
            "Run or checkpoint to resume; auto: the run in --out, or this job's after a"
            " requeue. Default: auto."
        ),
    )
    parser.add_argument(
        "--expect-profile-sha256",
        metavar="HASH",
        help="Fail with exit code 6 if the profile has another hash.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"trainer {_version()}",
        help="Show the version.",
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser


def _version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("encoder-autotune")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still runs, such as a DataLoader worker on a hung file system, must
    # not delay the end of a run.
    os._exit(exit_code)
