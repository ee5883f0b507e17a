"""Command line of the trainer.

    python -m trainer PROFILE [--data DIR] [--set train.KEY=VALUE] [--out DIR]
                              [--resume auto|PATH|never]

Run it under torchrun for several ranks. ``exit.json`` in the run directory has the exit
code and reason, as torchrun itself returns 1 for any failure of its ranks.

Imports of torch wait until the profile, the dataset and the run directory are checked:
they take seconds, and bad input is reported at once.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from trainer.checkpoint.resume import Start, choose_run
from trainer.command_line import build_parser
from trainer.config.resolve import ResolvedConfig, modified_text, resolve
from trainer.config.settings_text import settings_text
from trainer.failure_notes import FailureNote, publish_failure, read_failure
from trainer.formats.cpu_environment import CPU_ENVIRONMENT
from trainer.formats.errors import TrainerError, error_text, permission_denied
from trainer.formats.manifest import read_manifest
from trainer.formats.process_status import process_started_s
from trainer.formats.run_record import MODEL_DIRECTORY, RUN_FILE
from trainer.health.signals import SIGNALS, exit_signals
from trainer.health.watchdog import REQUEUE
from trainer.rank_job import JobEnd, RankJob, write_failure
from trainer.record.boards import check_installed
from trainer.record.closed_streams import ignore_closed_streams
from trainer.record.start_clock import StartClock
from trainer.record.writer import RunWriter


def main() -> int:
    """Train one model from a profile; return the exit code."""
    clock = StartClock(process_started_s())
    ignore_closed_streams()
    arguments = build_parser().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    # Has the writer of the run record as soon as it exists, so that a failure while the
    # run is being opened is recorded too; it stays empty on ranks other than 0.
    opened_writers: list[RunWriter] = []
    try:
        job = _open_job(arguments, rank, clock, opened_writers.append)
        job.prepare()
        return _report_end(job, job.run())
    except _Signalled as signalled:
        failure = _report_signal(signalled.signal_number)
    except (TrainerError, PermissionError) as error:
        failure = _report_error(error, rank)
    if opened_writers:
        write_failure(opened_writers[0], failure, clock)
    return failure.exit_code


def _open_job(
    arguments: argparse.Namespace,
    rank: int,
    clock: StartClock,
    on_open: Callable[[RunWriter], None],
) -> RankJob:
    """Resolve the configuration and, on rank 0, open the run.

    ``on_open`` gets the writer of the run record, even if opening the run then fails.
    """
    # Signals end the process cleanly, until the watchdog replaces these handlers.
    for signal_number in exit_signals():
        signal.signal(signal_number, _raise_signalled)
    resolved = resolve(
        arguments.profile,
        assignments=arguments.set,
        data=arguments.data,
        expect_sha256=arguments.expect_profile_sha256,
    )
    if resolved.config.device == "cpu":
        # Set before the import of torch, which reads these variables.
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    writer: RunWriter | None = None
    start = Start()
    if rank == 0:
        if resolved.profile_modified:
            sys.stderr.write(modified_text(arguments.profile))
        writer, start = _open_run(arguments, resolved, clock, on_open)
        sys.stderr.write(settings_text(resolved, writer.directory / RUN_FILE))
    return RankJob(
        resolved=resolved, rank=rank, writer=writer, start=start, clock=clock
    )


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
        # A missing dataset is reported before a run directory is made.
        read_manifest(resolved.data_dir)
    writer, start = choose_run(
        arguments.out, arguments.resume, resolved, on_open=on_open
    )
    clock.ended("restore")
    return writer, start


def _report_end(job: RankJob, end: JobEnd) -> int:
    """Report on rank 0 how the run ended; return the exit code.

    If some rank has not reached the end, this process exits at once instead.
    """
    if job.rank == 0 and end.exit_code == 0 and job.writer is not None:
        directory = job.writer.directory
        print(f"run: {directory}\nmodel: {directory / MODEL_DIRECTORY}")
    elif job.rank == 0 and end.exit_code == REQUEUE:
        sys.stderr.write(f"train: {end.reason}\n")
    if not end.left_together:
        # Threads of a broken process group may wait for their peers forever.
        _exit_at_once(end.exit_code)
    return end.exit_code


def _exit_at_once(exit_code: int) -> NoReturn:
    """Exit without waiting for threads that still run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class _Signalled(BaseException):
    """Signal before training began.

    It is a ``BaseException``, so that no handler of ``Exception`` catches it, as with
    Ctrl-C.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def _raise_signalled(signal_number: int, frame: object) -> None:
    """Handle a signal: ignore further ones, which would disturb the exit, and raise."""
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise _Signalled(signal_number)


def _report_signal(signal_number: int) -> FailureNote:
    """Report a signal before training began; return the exit code and its cause.

    The cause is the failure of another rank if there was one, as torchrun then signals
    all ranks to end.
    """
    reason = f"{signal.Signals(signal_number).name} before training began"
    sys.stderr.write(f"train: {reason}\n")
    failure = read_failure(os.environ)
    if failure is not None:
        return failure
    # 130 is the shell's exit code of a process that Ctrl-C ended.
    exit_code = 130 if signal_number == signal.SIGINT else REQUEUE
    return FailureNote(exit_code=exit_code, reason=reason)


def _report_error(error: TrainerError | PermissionError, rank: int) -> FailureNote:
    """Report an error on the console and to rank 0; return its exit code and reason."""
    if isinstance(error, PermissionError):
        error = permission_denied(error)
    # One rank of each node reports it, as the cause may exist only on that node.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(error_text(error.message, error.next_step, error.docs))
    if rank != 0:
        publish_failure(os.environ, error.exit_code, f"rank {rank}: {error.message}")
    return FailureNote(exit_code=error.exit_code, reason=error.message)


if __name__ == "__main__":
    # A thread that still runs, such as a DataLoader worker on a hung file system, must
    # not delay the end of a run.
    _exit_at_once(main())
