"""``python -m trainer PROFILE [--data DIR] [--set train.key=value] [--out DIR] [--resume auto|PATH|never]``.

Run it under torchrun for several ranks. ``exit.json`` in the run directory has the exit
code and reason, as torchrun itself returns 1 for any failure of its ranks.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY, list_checkpoints
from trainer.checkpoint.resume import AUTO, NEVER, Start, choose_run
from trainer.config.resolve import ResolvedConfig, resolve
from trainer.config.train_config import TrainConfig, dotted
from trainer.data.dataset import read_manifest
from trainer.documentation import documentation_path
from trainer.errors import DeviceOutOfMemory, RanksLost, TrainerError, error_text
from trainer.health.watchdog import (
    REQUEUE,
    SIGNALS,
    Watchdog,
    end_with_parent,
    exit_signals,
)
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


def main() -> int:
    """Train one model from a profile; return the exit code."""
    clock = StartClock(process_started_s())
    ignore_closed_streams()
    arguments = command_line().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    leads = rank == 0
    writer: RunWriter | None = None
    opened: list[RunWriter] = []
    start = Start()
    try:
        # Until the watchdog handles them, they end the process cleanly.
        for number in exit_signals():
            signal.signal(number, _raise_signalled)
        data, expected = arguments.data, arguments.expect_profile_sha256
        resolved = resolve(
            arguments.profile,
            assignments=arguments.set,
            data=data,
            expect_sha256=expected,
        )
        if resolved.config.device == "cpu":
            # Before torch is imported: its threads spin while they wait, which takes
            # the cores that others need.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if leads:
            clock.ended("import")
            check_installed(resolved.config.log_to)
            if resolved.config.data.stage_to is None:
                read_manifest(resolved.data_dir)  # before a run directory is made
            writer, start = choose_run(
                arguments.out, arguments.resume, resolved, on_open=opened.append
            )
            clock.ended("restore")
            _print_settings(resolved, writer.directory / RUN_FILE)
        job = _Job(resolved, rank, writer, start, clock)
        job.prepare()
        return job.run()
    except _Signalled as signalled:
        (number,) = signalled.args
        reason = f"{signal.Signals(number).name} before training began"
        code = 130 if number == signal.SIGINT else REQUEUE
        sys.stderr.write(f"train: {reason}\n")
        if (word := read_failure(os.environ)) is not None:
            code, reason = word  # torchrun ends all ranks when one fails
        _record(opened[0] if opened else None, code, reason, clock)
        return code
    except TrainerError as error:
        # From one rank of each node, as the cause may be only on that node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(error_text(error.message, error.next_step, error.docs))
        if not leads:
            publish_failure(
                os.environ, error.exit_code, f"rank {rank}: {error.message}"
            )
        _record(opened[0] if opened else None, error.exit_code, error.message, clock)
        return error.exit_code


class _Signalled(BaseException):
    """Signal before training began.

    A ``BaseException``, so that, as with Ctrl-C, no handler on the way catches it.
    """


def _raise_signalled(number: int, frame: object) -> None:
    for other in SIGNALS:  # one is enough, and another must not disturb the exit
        signal.signal(other, signal.SIG_IGN)
    raise _Signalled(number)


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
            with progress("stage") as copied:
                self.resolved = stage_data(self.resolved, update=copied)
        self.clock.ended("staging")

    def run(self) -> int:
        """Join the process group and train; return the exit code."""
        from trainer.distributed.ranks import (
            is_lost_rank_error,
            join_ranks,
            leave_ranks,
            process_group_timeout_s,
        )
        from trainer.health.failures import explain
        from trainer.loop import train

        # Until all ranks have joined the process group, one may still be staging its
        # data.
        self._watch = Watchdog(
            timeout_s=process_group_timeout_s(self.resolved.config),
            record=self._record_leaving,
        )
        self._watch.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        next_step, docs = "", None
        ending: RunExit | None = None
        try:
            ranks = join_ranks(self.resolved.config)
            writer = self._learn_of_run(ranks.broadcast_object)
            self._watch.timeout_s = self.resolved.config.parallel.timeout_s
            self._watch.heartbeat()
            self.clock.ended("process_group")
            if (ending := self.start.finished) is not None:
                told = (
                    f"train: nothing to do: the run finished at step {ending.steps}\n"
                )
                sys.stderr.write(told if self.rank == 0 else "")
            else:
                with progress("train") as update:
                    show = functools.partial(
                        show_row, update, self.resolved.config.max_steps
                    )
                    known: dict[str, Any] = {
                        "start": self.start,
                        "watchdog": self._watch,
                        "clock": self.clock,
                    }
                    ending = train(
                        self.resolved,
                        ranks,
                        writer,
                        show,
                        **known,
                        environment=os.environ,
                    )
            code, reason = ending.exit_code, ending.reason
        except TrainerError as error:
            code, reason, next_step, docs = (
                error.exit_code,
                error.message,
                error.next_step,
                error.docs,
            )
        except Exception as error:  # noqa: BLE001 - the border: the record and the other ranks learn of any error
            code, reason, next_step = explain(
                error, lost=is_lost_rank_error(error, rehearsed=self.clock.rehearsed)
            )
            if code == DeviceOutOfMemory.exit_code:
                docs = DeviceOutOfMemory.docs
            else:
                self._keep_traceback()
        if code not in (0, REQUEUE) or next_step:
            sys.stderr.write(error_text(f"rank {self.rank}: {reason}", next_step, docs))
        code = self._settle(code, reason, ending)
        code, together = (
            (code, False) if ending is None else self._leave_together(code, leave_ranks)
        )
        self._watch.stop()
        if self.rank == 0 and code == 0 and self.writer is not None:
            print(
                f"run: {self.writer.directory}\nmodel:"
                f" {self.writer.directory / MODEL_DIRECTORY}"
            )
        elif self.rank == 0 and code == REQUEUE:
            sys.stderr.write(f"train: {reason}\n")
        if not together:
            # Threads of a broken process group may wait for their peers forever.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _learn_of_run(self, tell: Callable[[Any], Any]) -> RunWriter:
        """Receive the run directory and the checkpoint to start from, which rank 0 broadcasts."""
        told = None
        if self.writer is not None:
            path = self.start.checkpoint
            start = replace(self.start, checkpoint=path and path.absolute())
            told = self.writer.directory.absolute(), self.writer.attempt, start
        told = tell(told)
        if self.writer is None:
            directory, attempt, self.start = told
            self.writer = RunWriter(directory, active=False)
            self.writer.attempt = attempt
        self._watch.traceback_file = (
            self.writer.directory / f"rank-{self.rank:05d}.traceback.txt"
        )
        return self.writer

    def _leave_together(
        self, code: int, leave: Callable[..., None]
    ) -> tuple[int, bool]:
        """Wait for the other ranks, under the watchdog.

        Return the exit code, and whether all of them came.
        """
        self._watch.end_within(
            min(_LAST_WAIT_S, self._watch.timeout_s)
            if self.rank == 0
            else self._watch.timeout_s
        )
        try:
            leave(together=True)
        except RuntimeError as error:
            from trainer.health.failures import explain

            _, reason, next_step = explain(error, lost=True)
            code = self._settle(RanksLost.exit_code, reason)
            next_step = next_step if code else "Nothing: the run is finished."
            sys.stderr.write(
                error_text(
                    f"rank {self.rank}: after the last step, {reason}",
                    next_step,
                    RanksLost.docs,
                )
            )
            return code, False
        return code, True

    def _settle(self, code: int, reason: str, ending: RunExit | None = None) -> int:
        """Record the exit and return its code.

        A rank that only lost another first waits for that rank's record.
        """
        if self.writer is None:
            publish_failure(os.environ, code, f"rank {self.rank}: {reason}")
            return code
        if code == RanksLost.exit_code and ending is None:
            deadline_s = time.monotonic() + _CAUSE_WAIT_S
            while time.monotonic() < deadline_s:
                if (known := read_exit(self.writer.directory)) is not None:
                    return known.exit_code
                time.sleep(0.1)
        if self.rank == 0 or ending is None:
            _record(
                self.writer,
                code,
                reason,
                self.clock,
                steps=self._watch.step,
                ending=ending,
            )
        return code

    def _record_leaving(self, why: str, step: int, perhaps: bool) -> None:
        if self.writer is None:
            return
        known = read_exit(self.writer.directory)
        if known is not None and (
            perhaps or self._watch.ending or known.exit_code != REQUEUE
        ):
            return  # another rank has recorded the cause
        word = None if step else read_failure(os.environ)
        code, reason = word or (REQUEUE, f"rank {self.rank}: {why}")
        _record(self.writer, code, reason, self.clock, steps=step)
        if word is not None:
            # Otherwise it would wait for a rank that is gone.
            sys.stderr.write(f"error: {reason}\n")
            sys.stderr.flush()
            os._exit(code)

    def _keep_traceback(self) -> None:
        text = traceback.format_exc()
        sys.stderr.write(f"rank {self.rank}: {text}")
        if (file := self._watch.traceback_file) is not None:
            try:
                file.write_text(text)
            except OSError as error:
                sys.stderr.write(
                    f"cannot save the traceback to {file}: {error.strerror}\n"
                )


def _record(
    writer: RunWriter | None,
    code: int,
    reason: str,
    clock: StartClock,
    *,
    steps: int = 0,
    ending: RunExit | None = None,
) -> None:
    """Write ``exit.json`` from ``ending``, or else from the other values.

    Report a disk error, but do not raise it.
    """
    if writer is None:
        return
    try:
        newest = next(
            (
                path.name
                for path in list_checkpoints(writer.directory / CHECKPOINTS_DIRECTORY)
            ),
            None,
        )
        writer.finish(ending or clock.exit(code, reason, steps, newest))
    except OSError as error:
        sys.stderr.write(
            error_text(
                f"cannot write exit.json: {error.strerror}",
                "Check the disk of the run.",
            )
        )


def publish_failure(
    environment: Mapping[str, str], exit_code: int, reason: str
) -> None:
    """Write a rank's failure note to torchrun's store, as rank 0 only sees that torchrun signals all ranks to end."""
    # Optional: the error itself is already being reported.
    with contextlib.suppress(Exception):
        store, key = _torchruns_store(environment)
        store.set(key, json.dumps([exit_code, reason]))


def read_failure(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the exit code and reason of a rank's failure note.

    None if there is none.
    """
    with contextlib.suppress(Exception):
        store, key = _torchruns_store(environment)
        if store.check([key]):
            exit_code, reason = json.loads(store.get(key))
            return int(exit_code), str(reason)
    return None


def _torchruns_store(environment: Mapping[str, str]) -> tuple[Any, str]:
    """Return the key-value store of torchrun's agent, and the key of this start's failure note."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LookupError("no torchrun")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exists, though not exported

    host, port, timeout = (
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        datetime.timedelta(seconds=5),
    )
    store = TCPStore(
        host, port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return store, f"trainer/word/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        old = any(word.partition("=")[0] == "--profile" for word in sys.argv)
        step = (
            "Name the profile without an option: python -m trainer PROFILE"
            if old
            else "See: python -m trainer -h"
        )
        self.exit(2, error_text(message, step))


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
    version = next(
        (
            one.version
            for one in importlib.metadata.distributions(name="encoder-autotune")
        ),
        "not installed",
    )
    option = parser.add_argument
    option(
        "profile",
        metavar="PROFILE",
        type=Path,
        help="Profile (TOML), as autotune tune writes it.",
    )
    option(
        "--data",
        type=Path,
        metavar="DIR",
        help="Dataset directory. Default: AUTOTUNE_DATA, else the profile's.",
    )
    option(
        "--set",
        action="append",
        default=[],
        metavar="train.KEY=VALUE",
        help="Override a setting; repeatable.",
    )
    option(
        "--out",
        type=Path,
        metavar="DIR",
        help="Run directory. Default: runs/<UTC>-<model>.",
    )
    resume = (
        "Run or checkpoint to resume; auto: the run in --out, or this job's after a"
        " requeue. Default: auto."
    )
    option("--resume", default=AUTO, metavar=f"{AUTO}|PATH|{NEVER}", help=resume)
    option(
        "--expect-profile-sha256",
        metavar="HASH",
        help="Fail with exit code 6 if the profile has another hash.",
    )
    option(
        "--version",
        action="version",
        version=f"trainer {version}",
        help="Show the version.",
    )
    option("-h", "--help", action="help", help="Show this help and exit.")
    return parser


def _print_settings(resolved: ResolvedConfig, record: Path) -> None:
    """Print the model and every setting that differs from its default, with its source, to standard error."""
    model = resolved.config.model
    defaults = dotted(TrainConfig(model=model).model_dump(mode="json"), "train.") | {
        "train.model.name": None
    }
    values = dotted(resolved.config.model_dump(mode="json"), "train.") | {
        "train.data.path": str(resolved.data_dir)
    }
    # Named by ``sources`` if the command line sets it.
    values |= dotted(model.config, "train.model.config.")
    changed = {
        key: source
        for key, source in resolved.sources.items()
        if values.get(key) != defaults.get(key)
    }
    lines = [
        f"  {key} = {values.get(key)}  ({source})\n"
        for key, source in sorted(changed.items())
    ]
    sys.stderr.write(
        f"train: settings that differ from the defaults; {record} has all of"
        f" them\n{''.join(lines)}"
    )


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still runs, such as a DataLoader worker on a hung file system, must
    # not delay the end of a run.
    os._exit(exit_code)
