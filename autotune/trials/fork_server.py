"""The main machine, which forks the processes of every trial from a server.

``ForkServerMachine`` keeps a server process (``autotune.trials.jobs.server``) that has
torch loaded and forks a child for each rank of a trial. ``rank_outcomes`` turns the
accounts of these ranks into an outcome.
"""

import itertools
import json
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InternalError, MachineLacks
from autotune.trials.messages import (
    ImportReply,
    ImportRequest,
    Preload,
    Request,
    RunReply,
    RunRequest,
    encode,
    request_line,
)
from autotune.trials.outcomes import Outcome, TimedOut
from autotune.trials.rank_outcomes import classify
from autotune.trials.trial_machine import START_TIMEOUT_S, StartedMachine
from autotune.trials.values import Trial
from trainer.formats.cpu_environment import CPU_ENVIRONMENT

END_TIMEOUT_S = 10.0
"""Time that the server has to end, in seconds."""
_OWN_FRAME = re.compile(r"/autotune/(\w+/jobs|trials)/")
"""Frame of a stack that belongs to this project, and not to your code."""
_MAX_FRAMES = 8
"""Frames of a stack that a message quotes: enough to see the call that hangs."""
_MAX_SERVER_LOG_CHARACTERS = 2000
"""Characters of the server's log that a message quotes, from its end: a traceback."""


class ForkServerMachine(StartedMachine):
    """Machine that forks every trial from a server process that has torch loaded.

    Each rank of a trial has its own session. When the rank ends, its whole process
    group is killed. The server itself uses no GPU.
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
                environment. It has no effect with ``preload``: trials of your code have
                your environment, as your training will.
            preload: Function to call instead of loading the trainer.
            start_timeout_s: Longest time that the server may take to import.
        """
        runs_trainer_on_cpu = preload is None and device == "cpu"
        super().__init__(CPU_ENVIRONMENT if runs_trainer_on_cpu else None)
        self._preload = preload
        self._start_timeout_s = start_timeout_s
        self._scratch = Path(tempfile.mkdtemp(prefix="autotune-"))
        """Directory for logs and results, which only you may read: they may quote
        data."""
        self._server: subprocess.Popen[str] | None = None
        """The server's process; None before its start and after its end."""

    def _run(self, trial: Trial) -> Outcome:
        server = self._ensure_started()
        with tempfile.TemporaryDirectory(
            dir=self._scratch, ignore_cleanup_errors=True
        ) as directory:
            request = RunRequest(
                job=trial.job,
                measured=trial.measured,
                local=trial.local,
                timeout_s=trial.timeout_s,
                directory=directory,
            )
            reply = RunReply.from_json(self._request(server, request))
        if reply.timed_out:
            stack = _stack_at_timeout(reply.ranks[0].log_tail)
            return TimedOut(detail=f"killed after {trial.timeout_s:g} s{stack}")
        return classify(reply.ranks, killed_by_kernel=reply.killed_by_kernel)

    def load(self, modules: Sequence[str]) -> bool:
        """Import modules in the server, so that trials do not.

        Modules that cannot be imported are left out. If the imports start threads,
        which do not survive a fork, the server is started again without these modules.

        Returns:
            True if the server has the modules.
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
        if self._server is not None:
            _end_server(self._server)
            self._server = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ensure_started(self) -> "subprocess.Popen[str]":
        if self._server is not None and self._server.poll() is None:
            return self._server
        self._scratch.mkdir(mode=0o700, exist_ok=True)
        # -P leaves the working directory, whose modules may have any name, out of the
        # search for modules.
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
                # In its own session, so that Ctrl-C reaches only this process, which
                # then closes the server, and the server ends the trial.
                start_new_session=True,
                env=self.environment,
            )
        try:
            self.versions = self._read_reply(self._server, self._start_timeout_s)
        except KeyboardInterrupt:
            # Closed, the server would end only after its imports. It can be killed, as
            # it has no trial yet.
            self._server.kill()
            raise
        return self._server

    def _request(
        self,
        server: "subprocess.Popen[str]",
        request: Request,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request to the server.

        Args:
            server: The server's process.
            request: The request.
            timeout_s: Longest wait for the reply; None waits for as long as it takes.

        Returns:
            The reply.

        Raises:
            MachineLacks: If torch is not installed.
            InternalError: If the server ended, or did not reply in time.
        """
        assert server.stdin is not None
        try:
            server.stdin.write(request_line(request))
            server.stdin.flush()
        except BrokenPipeError as error:
            raise self._error_of_ended_server(server) from error
        return self._read_reply(server, timeout_s)

    def _read_reply(
        self, server: "subprocess.Popen[str]", timeout_s: float | None
    ) -> dict[str, Any]:
        """Return the server's next reply.

        Arguments and errors are those of ``_request``. A server that does not reply in
        time is killed.
        """
        assert server.stdout is not None
        readable, _, _ = select.select([server.stdout], [], [], timeout_s)
        if not readable:
            server.kill()
            server.wait()
            self._server = None
            raise InternalError(
                f"the trial server did not answer within {timeout_s:g} s",
                next_step=(
                    "The machine or its file system may be busy: run the same command"
                    " again."
                ),
            )
        line = server.stdout.readline()
        if not line:
            raise self._error_of_ended_server(server)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _error_of_ended_server(
        self, server: "subprocess.Popen[str]"
    ) -> MachineLacks | InternalError:
        """Return the error that explains, from its log, why the server ended."""
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


def _end_server(server: "subprocess.Popen[str]") -> None:
    """Let a server end the trial that runs, and exit; kill it if it does not."""
    assert server.stdin is not None
    try:
        server.stdin.close()
        server.wait(timeout=END_TIMEOUT_S)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        server.kill()
        server.wait()


def _stack_at_timeout(log_tail: str) -> str:
    """Return the stack that a job wrote to its log before its time limit.

    Returns:
        A colon and the calls of your code, the innermost first; empty if the log has no
        stack.
    """
    _, heading, stack = log_tail.rpartition("(most recent call first):\n")
    if not heading:
        return ""
    frames = itertools.takewhile(
        lambda frame: not _OWN_FRAME.search(frame), stack.splitlines()
    )
    return ":\n" + "\n".join(itertools.islice(frames, _MAX_FRAMES))
