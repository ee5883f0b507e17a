"""The fork server: loads torch and transformers once, then forks one child per trial.

Speaks JSON lines: a request on standard input, a reply on standard output. It runs no computation itself, so that no
thread pool and no CUDA context exists when it forks. When its standard input closes, it kills what runs and ends.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import transformers

from autotune.process import end_with_parent

JOBS = frozenset({"step", "feed", "matmul", "fault"})
POLL_S = 0.01


def serve() -> None:
    """Answer requests until standard input closes."""
    # Replies go to the real standard output; whatever a library prints goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in ("trainer.loop", "autotune.measure.jobs.step", "autotune.measure.jobs.feed", "torch._dynamo"):
        importlib.import_module(module)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    _send(replies, versions)
    preloaded: set[str] = set()
    while line := _read_line():
        request = json.loads(line)
        _preload(request["measured"], preloaded)
        _send(replies, _run(request))


def _send(replies: Any, value: dict[str, Any]) -> None:  # noqa: ANN401 - a text stream
    replies.write(json.dumps(value) + "\n")
    replies.flush()


_buffer = bytearray()


def _read_line() -> bytes:
    """One line of standard input, read unbuffered so that ``select`` sees what is left; empty at its end."""
    while b"\n" not in _buffer:
        chunk = os.read(0, 65536)
        if not chunk:
            return b""
        _buffer.extend(chunk)
    line, _, rest = bytes(_buffer).partition(b"\n")
    _buffer[:] = rest
    return line


def _preload(measured: dict[str, Any], preloaded: set[str]) -> None:
    """Import a model type's code before the fork, by building its default shape without memory."""
    model_type = measured.get("config", {}).get("model", {}).get("config", {}).get("model_type")
    if not isinstance(model_type, str) or model_type in preloaded:
        return
    preloaded.add(model_type)
    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    directory = Path(request["directory"])
    kills_before = _kernel_kills()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(request, directory, server)
    deadline_s = time.monotonic() + request["timeout_s"]
    exit_code, timed_out = _wait(pid, deadline_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # loader processes that outlived the trial
    result_file = directory / "result.json"
    log = directory / "log"
    return {
        "result": json.loads(result_file.read_text()) if result_file.exists() else None,
        "exit_code": exit_code,
        "timed_out": timed_out,
        "killed_by_kernel": _kernel_kills() > kills_before,
        "log_tail": log.read_text(errors="replace")[-4000:] if log.exists() else "",
    }


def _wait(pid: int, deadline_s: float) -> tuple[int, bool]:
    """Wait for a child, its deadline, or the end of our parent; returns its exit code and whether it was late."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        late = time.monotonic() > deadline_s
        readable, _, _ = select.select([0], [], [], 0 if late else POLL_S)
        orphaned = bool(readable) and not _read_ahead()
        if late or orphaned:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)  # in case it had not yet made its own group
            os.waitpid(pid, 0)
            if orphaned:
                sys.exit(0)
            return -signal.SIGKILL, True


def _read_ahead() -> bool:
    """Take what is on standard input; False at its end."""
    chunk = os.read(0, 65536)
    _buffer.extend(chunk)
    return bool(chunk)


def _child(request: dict[str, Any], directory: Path, server: int) -> NoReturn:
    os.setsid()
    end_with_parent(server)
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    code = 1
    try:
        from autotune.measure.jobs.child import run_job

        if request["job"] not in JOBS:
            raise ValueError(f"unknown job {request['job']!r}")
        run_job(request["job"], request["measured"], request["place"], directory)
        code = 0
    finally:
        os._exit(code)  # no interpreter shutdown: handlers of the server are not the child's to run


def _kernel_kills() -> int:
    """How often the kernel killed for memory in this control group or, failing that, on this host."""
    for path in _memory_event_files():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _memory_event_files() -> list[Path]:
    """Control group v2, then v1, then the host's counter."""
    files: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
            elif controllers == "memory":
                files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return [*files, Path("/proc/vmstat")]


if __name__ == "__main__":
    psutil.Process()  # imported for children, which must not import anything near their memory limit
    serve()
