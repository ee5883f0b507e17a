"""Machines that run trials, and the main one, which forks a child for each trial.

``Machine`` is the interface. ``ForkServerMachine`` keeps a server process
(``autotune.trials.jobs.server``) that has torch loaded and forks a child for each rank
of a trial; ``classify`` turns the accounts of these ranks into an outcome.
"""

import abc
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from autotune.errors import BadInput, InternalError, MachineLacks
from autotune.trials.messages import (
    ImportReply,
    ImportRequest,
    JobResult,
    JobStatus,
    Preload,
    RankAccount,
    Request,
    TrialReply,
    TrialRequest,
    encode,
    request_line,
)
from autotune.trials.values import (
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
    Trial,
)
from trainer.environment import CPU_ENVIRONMENT
from trainer.errors import HOST_OUT_OF_MEMORY

START_TIMEOUT_S = 300.0
"""Longest start of the server, or of the ranks; on a network file system imports take
minutes."""
END_TIMEOUT_S = 10.0
"""Time that the server has to end, in seconds."""
ENVIRONMENT = {
    # Models are built from scratch, without network access.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Libraries look for a GPU at import; through the CUDA runtime this would break CUDA
    # in all forked processes.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables of every process that runs trials."""

_OWN_FRAME = re.compile(r"/autotune/(trials|integrations/jobs)/")
"""Frame of a stack that belongs to this project, and not to your code."""
_MAX_FRAMES = 8
"""Frames of a stack that a message quotes: enough to see the call that hangs."""
_MAX_SERVER_LOG_CHARACTERS = 2000
"""Characters of the server's log that a message quotes, from its end: a traceback."""
_MAX_OUT_OF_MEMORY_CHARACTERS = 500
"""Characters of a rank's log that an out of memory quotes, from its end."""
_MAX_CRASH_CHARACTERS = 1000
"""Characters of a rank's log that a crash quotes, from its end."""
_TRAINER_SETTING = re.compile(r"--set train\.(\w+)=([^\s,;]+?)(?=[\s,;]|\.?$)")
"""A setting as messages of the trainer write it."""


class Machine(Protocol):
    """Machine that runs one trial at a time, each in its own processes."""

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, its failure or its time limit."""

    def close(self) -> None:
        """End all processes that still run."""


class StartedMachine(abc.ABC):
    """Machine whose processes are started once, which takes some seconds.

    They start with ``start``, or else with the first trial.
    """

    def __init__(self, environment_defaults: Mapping[str, str] | None = None) -> None:
        """Prepare the machine; ``environment_defaults`` holds unless you set others."""
        self._environment_defaults = environment_defaults or {}
        self.versions: dict[str, Any] = {}
        """Versions of torch, CUDA and transformers, once the processes have started;
        ``preloaded``, if anything."""
        self.waited_s = 0.0
        """Time that this process has waited for the processes and their trials."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the processes."""
        return {**self._environment_defaults, **os.environ, **ENVIRONMENT}

    def start(self) -> None:
        """Start the processes now.

        Raises:
            MachineLacks: If they cannot be started.
        """
        with self._waiting():
            self._ensure_started()

    def run(self, trial: Trial) -> Outcome:
        """Run a trial.

        Raises:
            MachineLacks: If its processes do not start.
            BadInput: If its input is unusable.
        """
        with self._waiting():
            return self._run(trial)

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes, and with them a trial that still runs."""

    @abc.abstractmethod
    def _ensure_started(self) -> object:
        """Start the processes unless they run."""

    @abc.abstractmethod
    def _run(self, trial: Trial) -> Outcome: ...

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block as waited."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started_s


class ForkServerMachine(StartedMachine):
    """Machine that forks every trial from a server process that has torch loaded.

    A trial runs in its own session; its whole process group is killed at its end. The
    server itself uses no GPU.
    """

    def __init__(
        self,
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        preload: Preload | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare a server; the first trial, or ``start``, starts it.

        Args:
            device: Device of the trainer's trials; on a CPU they have the trainer's
                environment. Has no effect with ``preload``.
            preload: Function to call instead of loading the trainer. Trials of your
                code have your environment, as your training will.
            start_timeout_s: Longest time that the server may import.
        """
        runs_trainer_on_cpu = preload is None and device == "cpu"
        super().__init__(CPU_ENVIRONMENT if runs_trainer_on_cpu else None)
        self._preload = preload
        self._start_timeout_s = start_timeout_s
        # Private to the user: logs of trials may quote data.
        self._scratch = Path(tempfile.mkdtemp(prefix="autotune-"))
        self._server: subprocess.Popen[str] | None = None

    def _run(self, trial: Trial) -> Outcome:
        server = self._ensure_started()
        with tempfile.TemporaryDirectory(
            dir=self._scratch, ignore_cleanup_errors=True
        ) as directory:
            request = TrialRequest(
                job=trial.job,
                measured=trial.measured,
                local=trial.local,
                timeout_s=trial.timeout_s,
                directory=directory,
            )
            reply = TrialReply.from_json(self._request(server, request))
        if reply.timed_out:
            stack = _stack_at_timeout(reply.ranks[0].log_tail)
            return TimedOut(detail=f"killed after {trial.timeout_s:g} s{stack}")
        return classify(reply.ranks, killed_by_kernel=reply.killed_by_kernel)

    def load(self, modules: Sequence[str]) -> bool:
        """Import modules in the server, so that trials do not.

        Those that cannot be imported are left out.

        Returns:
            False if that started threads, which a fork breaks: then the server is
            started again, without them.
        """
        request = ImportRequest(modules=list(modules))
        reply = ImportReply(
            **self._request(self._ensure_started(), request, self._start_timeout_s)
        )
        if reply.threads == 0:
            return True
        self.close()
        self.start()
        return False

    def restart(self, preload: Preload) -> None:
        """End the server, and start one with another ``preload``."""
        self.close()
        self._preload = preload
        self.start()

    def close(self) -> None:
        """End the server, and with it a trial that still runs."""
        server, self._server = self._server, None
        if server is not None:
            assert server.stdin is not None
            try:
                server.stdin.close()
                server.wait(timeout=END_TIMEOUT_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                server.kill()
                server.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ensure_started(self) -> "subprocess.Popen[str]":
        if self._server is not None and self._server.poll() is None:
            return self._server
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        # -P, as the working directory may have modules of any name.
        command = [sys.executable, "-P", "-m", "autotune.trials.jobs.server"]
        if self._preload is not None:
            command.append(encode(self._preload))
        with (self._scratch / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A session of its own: Ctrl-C is for this process, which then closes
                # the server; the trial ends with it.
                start_new_session=True,
                env=self.environment,
            )
        try:
            self.versions = self._read_reply(self._server, self._start_timeout_s)
        except KeyboardInterrupt:
            # It would notice only after its imports, and has no trial to end.
            self._server.kill()
            raise
        return self._server

    def _request(
        self,
        server: "subprocess.Popen[str]",
        request: Request,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the reply."""
        assert server.stdin is not None
        try:
            server.stdin.write(request_line(request))
            server.stdin.flush()
        except BrokenPipeError as error:
            raise self._server_died(server) from error
        return self._read_reply(server, timeout_s)

    def _read_reply(
        self, server: "subprocess.Popen[str]", timeout_s: float | None
    ) -> dict[str, Any]:
        """Return the next reply; end a server that takes longer than ``timeout_s``."""
        assert server.stdout is not None
        readable, _, _ = select.select([server.stdout], [], [], timeout_s)
        if not readable:
            server.kill()
        line = server.stdout.readline()
        if not line:
            raise self._server_died(server)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _server_died(self, server: "subprocess.Popen[str]") -> Exception:
        exit_code = server.wait()
        self._server = None
        log = self._scratch / "server.log"
        log_text = log.read_text(errors="replace") if log.exists() else ""
        log_tail = log_text[-_MAX_SERVER_LOG_CHARACTERS:]
        if "No module named 'torch'" in log_tail:
            return MachineLacks(
                "torch is not installed", next_step="Install it: pip install torch"
            )
        return InternalError(
            f"the trial server exited with code {exit_code}:\n{log_tail}",
            next_step="Report this as a bug.",
        )


def _stack_at_timeout(log_tail: str) -> str:
    """Return the stack that a job wrote to its log before its time limit.

    It has the innermost calls first, up to the first call of this project. Return an
    empty string if the job wrote none.
    """
    _, heading, stack = log_tail.rpartition("(most recent call first):\n")
    if not heading:
        return ""
    frames = itertools.takewhile(
        lambda frame: not _OWN_FRAME.search(frame), stack.splitlines()
    )
    return ":\n" + "\n".join(itertools.islice(frames, _MAX_FRAMES))


def classify(
    ranks: Sequence[RankAccount], *, killed_by_kernel: bool = False
) -> Outcome:
    """Turn the accounts of a trial's ranks into an outcome.

    That is the outcome of the first failure, as it makes the other ranks fail.

    Args:
        ranks: The accounts, in the order of the ranks.
        killed_by_kernel: True if the kernel killed a process for memory meanwhile.

    Raises:
        BadInput: If the job could not use its input, which is no measurement.
        MachineLacks: If the job could not use the device.
    """
    outcomes = [
        _rank_outcome(account, killed_by_kernel=killed_by_kernel) for account in ranks
    ]
    failures = {
        rank: outcome
        for rank, outcome in enumerate(outcomes)
        if not isinstance(outcome, Measured)
    }
    if not failures:
        return outcomes[0]
    # False sorts first: a rank that lost its peer is the first failure only if all did.
    first_rank = min(
        failures, key=lambda rank: (_lost_its_peer(ranks[rank]), ranks[rank].ended_s)
    )
    failure = failures[first_rank]
    result = ranks[first_rank].result
    if result is not None and result.status is JobStatus.REJECTED:
        raise _rejection(result)
    if len(ranks) == 1 or all(isinstance(outcome, OutOfMemory) for outcome in outcomes):
        return failure
    return replace(
        failure, detail=f"rank {first_rank} of {len(ranks)}: {failure.detail}"
    )


def _rejection(result: JobResult) -> BadInput | MachineLacks:
    """Return the error of a job that could not use its input or device."""
    # Settings in the trainer's message become options of the commands that run it.
    next_step = _TRAINER_SETTING.sub(
        lambda setting: f"--{setting[1].replace('_', '-')} {setting[2]}",
        result.next_step,
    )
    if result.exit_code == MachineLacks.exit_code:
        return MachineLacks(result.detail, next_step=next_step)
    return BadInput(result.detail, next_step=next_step)


def _lost_its_peer(account: RankAccount) -> bool:
    """Return whether a rank failed because another had."""
    if account.result is None:
        return account.killed
    return account.result.status is JobStatus.LOST_PEER


def _rank_outcome(account: RankAccount, *, killed_by_kernel: bool) -> Outcome:
    result = account.result
    if result is None:
        return _outcome_without_result(account, killed_by_kernel=killed_by_kernel)
    if result.status is JobStatus.MEASURED:
        return Measured(figures=result.figures)
    if result.status is JobStatus.OUT_OF_MEMORY:
        return OutOfMemory(detail=result.detail)
    return Crashed(detail=result.detail)


def _outcome_without_result(account: RankAccount, *, killed_by_kernel: bool) -> Outcome:
    """Return the outcome of a rank that ended before it could write its result."""
    # Written by C++ and the allocator if they cannot raise.
    if HOST_OUT_OF_MEMORY.search(account.log_tail):
        return OutOfMemory(detail=account.log_tail[-_MAX_OUT_OF_MEMORY_CHARACTERS:])
    was_killed = account.exit_code == -signal.SIGKILL
    if was_killed and killed_by_kernel and not account.killed:
        return HostOutOfMemory(
            detail="the kernel killed the trial because the host ran out of memory"
        )
    quoted_log = account.log_tail[-_MAX_CRASH_CHARACTERS:]
    return Crashed(detail=f"exit code {account.exit_code}: {quoted_log}")
