"""Interface through which trials run, and its main implementation: a server process that forks a child for each."""

import abc
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, Self

from autotune.errors import BadInput, InternalError, MachineLacks
from autotune.trials.values import (
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
    Trial,
)
from trainer.errors import HOST_OUT_OF_MEMORY

_OURS = re.compile(r"/autotune/(trials|integrations/jobs)/")
START_TIMEOUT_S = 300.0
"""Longest start of the server, or of the ranks; on a network file system imports take
minutes."""
ENVIRONMENT = {
    # Models are built from scratch, without network access.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Libraries look for a GPU at import; through the CUDA runtime this would break CUDA
    # in all forked processes.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables of every process that runs trials."""


class Machine(Protocol):
    """Machine that runs one trial at a time, each in its own processes, and returns its outcome."""

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, its failure or its time limit."""

    def close(self) -> None:
        """End all processes that still run."""


class StartedMachine(abc.ABC):
    """Machine whose processes are started once, which takes some seconds: with ``start``, or the first trial."""

    def __init__(self) -> None:
        self.versions: dict[str, Any] = {}
        """Versions of torch, CUDA and transformers, once the processes have started;
        ``preloaded``, if anything."""
        self.waited_s = 0.0
        """Time that this process has waited for the processes and their trials."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes now; raise ``MachineLacks`` if they cannot be started."""
        with self._waiting():
            self._started()

    def run(self, trial: Trial) -> Outcome:
        """Run a trial.

        Raises:
            MachineLacks: If its processes do not start, ``BadInput`` if its input is
                unusable.
        """
        with self._waiting():
            return self._run(trial)

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes, and with them a trial that still runs."""

    @abc.abstractmethod
    def _started(self) -> object: ...

    @abc.abstractmethod
    def _run(self, trial: Trial) -> Outcome: ...

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began_s


class ForkServerMachine(StartedMachine):
    """Machine that forks every trial from a server process that has torch and transformers loaded.

    A trial runs in its own session; its whole process group is killed at its end. The
    server itself uses no GPU.
    """

    def __init__(
        self,
        preload: Mapping[str, Any] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepare a server that loads the trainer, or calls ``preload`` instead, as ``jobs.server.serve`` says."""
        super().__init__()
        self._arguments = [] if preload is None else [json.dumps(preload)]
        self._start_timeout_s = start_timeout_s
        # Private to the user: logs of trials may quote data.
        self._scratch = Path(tempfile.mkdtemp(prefix="autotune-"))
        self._server: subprocess.Popen[str] | None = None

    def _run(self, trial: Trial) -> Outcome:
        server = self._started()
        with tempfile.TemporaryDirectory(
            dir=self._scratch, ignore_cleanup_errors=True
        ) as directory:
            reply = self._ask(server, asdict(trial) | {"directory": directory})
        if reply["timed_out"]:
            return TimedOut(
                detail=(
                    f"killed after {trial.timeout_s:g}"
                    f" s{_where(reply['ranks'][0]['log_tail'])}"
                )
            )
        return classify(reply["ranks"], killed_by_kernel=reply["killed_by_kernel"])

    def load(self, modules: Sequence[str]) -> bool:
        """Import modules in the server, so that trials do not.

        Those that cannot be imported are left out.

        Return False if that started threads, which a fork breaks: then the server is
        started again, without them.
        """
        if not self._ask(
            self._started(), {"modules": list(modules)}, self._start_timeout_s
        )["threads"]:
            return True
        self.close()
        self.start()
        return False

    def restart(self, preload: Mapping[str, Any]) -> None:
        """End the server, and start one with another ``preload``."""
        self.close()
        self._arguments = [json.dumps(preload)]
        self.start()

    def close(self) -> None:
        """End the server, and with it a trial that still runs."""
        server, self._server = self._server, None
        if server is not None:
            assert server.stdin is not None
            try:
                server.stdin.close()
                server.wait(timeout=10)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                server.kill()
                server.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _started(self) -> "subprocess.Popen[str]":
        if self._server is not None and self._server.poll() is None:
            return self._server
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        with (self._scratch / "server.log").open("w") as log:
            # Your directory may have modules of any name.
            flags = ["-P"] if self._arguments else []
            # A session of its own: Ctrl-C is for this process, which then closes the
            # server; the trial ends with it.
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    *flags,
                    "-m",
                    "autotune.trials.jobs.server",
                    *self._arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | ENVIRONMENT,
            )
        self.versions = self._read(self._server, self._start_timeout_s)
        return self._server

    def _ask(
        self,
        server: "subprocess.Popen[str]",
        request: dict[str, Any],
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        assert server.stdin is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
        except BrokenPipeError as error:
            raise self._server_died(server) from error
        return self._read(server, timeout_s)

    def _read(
        self, server: "subprocess.Popen[str]", timeout_s: float | None
    ) -> dict[str, Any]:
        """Return the next reply.

        End a server that takes longer to import than ``timeout_s``.
        """
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], timeout_s)[0]:
            server.kill()
        if not (line := server.stdout.readline()):
            raise self._server_died(server)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _server_died(self, server: "subprocess.Popen[str]") -> Exception:
        code = server.wait()
        self._server = None
        log = self._scratch / "server.log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        if "No module named 'torch'" in tail:
            return MachineLacks(
                "torch is not installed", next_step="Install it: pip install torch"
            )
        return InternalError(
            f"the trial server exited with code {code}:\n{tail}",
            next_step="Report this as a bug.",
        )


def _where(log_tail: str) -> str:
    """Return the stack that a job had written before its time limit: eight calls at most, the innermost first."""
    _, found, stack = log_tail.rpartition("(most recent call first):\n")
    frames = list(
        itertools.takewhile(lambda frame: not _OURS.search(frame), stack.splitlines())
    )
    return ":\n" + "\n".join(frames[:8]) if found else ""


def classify(
    ranks: Sequence[dict[str, Any]], *, killed_by_kernel: bool = False
) -> Outcome:
    """Turn the accounts of a trial's ranks into an outcome: the first failure, as it makes the other ranks fail.

    ``ranks`` has for each rank ``result`` (what it wrote, or None), ``exit_code``
    (negative for a signal), ``killed`` (by the server), ``ended_s`` and ``log_tail``;
    ``killed_by_kernel`` is True if memory ran out meanwhile. Raise ``BadInput`` if the
    job could not use its input, which is no measurement, ``MachineLacks`` if not the
    device.
    """
    outcomes = [
        _of_rank(account, killed_by_kernel=killed_by_kernel) for account in ranks
    ]
    failures = {
        rank: outcome
        for rank, outcome in enumerate(outcomes)
        if not isinstance(outcome, Measured)
    }
    if not failures:
        return outcomes[0]
    first = min(
        failures, key=lambda rank: (_follows(ranks[rank]), ranks[rank]["ended_s"])
    )
    result = ranks[first]["result"]
    if result is not None and result["status"] == "refused":
        kind = (
            MachineLacks if result["exit_code"] == MachineLacks.exit_code else BadInput
        )
        # Settings in the trainer's message become options of the commands that run it.
        setting = r"--set train\.(\w+)=([^\s,;]+?)(?=[\s,;]|\.?$)"
        as_option = re.sub(
            setting,
            lambda match: f"--{match[1].replace('_', '-')} {match[2]}",
            result["next_step"],
        )
        raise kind(result["message"], next_step=as_option)
    if len(ranks) == 1 or all(isinstance(outcome, OutOfMemory) for outcome in outcomes):
        return failures[first]
    return replace(
        failures[first],
        detail=f"rank {first} of {len(ranks)}: {failures[first].detail}",
    )


def _follows(account: dict[str, Any]) -> bool:
    """Return whether a rank failed because another had."""
    result = account["result"]
    return (
        bool(account["killed"]) if result is None else result["status"] == "lost_peer"
    )


def _of_rank(account: dict[str, Any], *, killed_by_kernel: bool) -> Outcome:
    result, log_tail = account["result"], account["log_tail"]
    if result is not None and result["status"] == "measured":
        return Measured(figures=result["figures"])
    if result is not None and result["status"] == "out_of_memory":
        return OutOfMemory(detail=result["detail"])
    if result is not None:
        return Crashed(
            detail=(
                result["message"] if result["status"] == "refused" else result["detail"]
            )
        )
    # Written by C++ and the allocator if they cannot raise.
    if HOST_OUT_OF_MEMORY.search(log_tail):
        return OutOfMemory(detail=log_tail[-500:])
    if account["exit_code"] == -9 and killed_by_kernel and not account["killed"]:
        return HostOutOfMemory(
            detail="the kernel killed the trial because the host ran out of memory"
        )
    return Crashed(detail=f"exit code {account['exit_code']}: {log_tail[-1000:]}")
