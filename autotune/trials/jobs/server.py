"""The fork server: loads torch, and what trials need, once, then forks the processes of one trial after the other.

A trial has a process for each local rank; they are watched and ended together.

Speaks JSON lines: a request on standard input, a reply on standard output. It runs no
computation itself, so that no thread pool and no CUDA context exists when it forks.
When its standard input closes, it kills what runs and ends.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from autotune.base.process import end_with_parent, keep_orphans
from autotune.trials.values import JOB_MODULES
from trainer.errors import TrainerError
from trainer.files import write_atomically
from trainer.health.failures import is_vague, out_of_memory

POLL_S = 0.01
GRACE_S = 2.0
"""Time that the other ranks have after a rank's failure to notice it and write their
accounts, in seconds."""


def preload_trainer() -> None:
    """Import the trainer, the jobs that use it, and modules that torch would import in the first step."""
    # Transformers imports torchao where it is installed, which starts CUDA, and breaks
    # it in forked processes.
    sys.modules["torchao"] = None  # type: ignore[assignment]
    for module in (
        "trainer.loop",
        "autotune.memory.jobs.step",
        "autotune.workers.job",
        "torch._dynamo",
    ):
        importlib.import_module(module)
    del sys.modules["torchao"]


@functools.cache
def preload_model(model_type: str | None) -> None:
    """Import a model type's code, by building its default shape on the meta device.

    Do nothing for None.
    """
    if model_type is None:
        return
    import transformers

    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One rank, in its own process session."""

    pid: int
    exit_code: int | None = None
    ended_s: float | None = None
    killed: bool = False
    """True if this server killed it."""

    def runs(self) -> bool:
        """Return whether it still runs.

        If not, end all processes that it left running.
        """
        if self.exit_code is None and os.waitid(
            os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            self.reap()
        return self.exit_code is None

    def reap(self) -> None:
        """Wait for its end, and end its process group before its id can be reused."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.exit_code, self.ended_s = (
            os.waitstatus_to_exitcode(status),
            time.monotonic(),
        )


def run_trial(
    request: dict[str, Any], parent_gone: Callable[[float], bool]
) -> dict[str, Any]:
    """Run a trial in as many processes as it has local ranks.

    Return what ``classify`` reads, and ``timed_out``.

    ``request`` has ``job``, ``measured``, ``local``, ``timeout_s`` and ``directory``,
    the trial's own. ``parent_gone`` waits for some seconds, and returns True if the
    parent no longer wants the answer.
    """
    kills_before, server = _kernel_kills(), os.getpid()
    local_ranks = request["measured"].get("local_ranks", 1)
    ranks: list[RankProcess] = []
    for rank in range(local_ranks):
        if (pid := os.fork()) == 0:
            _child(request, rank, local_ranks, server)
        ranks.append(RankProcess(pid=pid))
    timed_out = _watch(ranks, time.monotonic() + request["timeout_s"], parent_gone)
    _kill_orphans()
    accounts = [
        _account(process, Path(request["directory"]), rank)
        for rank, process in enumerate(ranks)
    ]
    return {
        "timed_out": timed_out,
        "killed_by_kernel": _kernel_kills() > kills_before,
        "ranks": accounts,
    }


def _watch(
    ranks: list[RankProcess], deadline_s: float, parent_gone: Callable[[float], bool]
) -> bool:
    """Wait until all ranks have ended, or end them.

    Return whether the deadline was the reason.
    """
    failed = False
    while running := [process for process in ranks if process.runs()]:
        if not failed and any(process.exit_code for process in ranks):
            # The others wait for it, some until they are killed.
            failed, deadline_s = True, min(deadline_s, time.monotonic() + GRACE_S)
        late = time.monotonic() > deadline_s
        gone = parent_gone(0 if late else POLL_S)
        if late or gone:
            for process in running:
                process.killed = True
                # Its group follows; it may not have made one yet.
                os.kill(process.pid, signal.SIGKILL)
            for process in running:
                process.reap()
            if gone:
                raise SystemExit(0)
            return not failed
    return False


def _kill_orphans() -> None:
    """End processes that a trial left running in other sessions.

    The end of their parents made them this one's.
    """
    while orphans := psutil.Process().children():
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, 0)


def _account(process: RankProcess, directory: Path, rank: int) -> dict[str, Any]:
    """Return the account of a rank for ``classify``.

    Without a result, it ended when its end was noticed.
    """
    file, log = directory / f"rank-{rank}.json", directory / f"rank-{rank}.log"
    result = json.loads(file.read_text()) if file.exists() else None
    return {
        "result": result,
        "exit_code": process.exit_code,
        "killed": process.killed,
        "ended_s": process.ended_s if result is None else result["ended_s"],
        "log_tail": log.read_text(errors="replace")[-4000:] if log.exists() else "",
    }


def _child(request: dict[str, Any], rank: int, ranks: int, server: int) -> NoReturn:
    os.setsid()
    end_with_parent(server)
    directory, local = Path(request["directory"]), request["local"]
    if ranks > 1:  # its ranks, as torchrun sets them, and the rendezvous
        numbers = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        local |= {"environment": numbers, "rendezvous": str(directory / "rendezvous")}
    log = os.open(
        directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    with contextlib.suppress(OSError):
        # If the host runs out of memory, a trial ends, and not you.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # All ranks are on this host; gloo would otherwise go by the host's name, which need
    # not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = 1
    try:
        code = (
            0
            if run_job(
                request["job"],
                directory / f"rank-{rank}.json",
                request["measured"],
                local,
            )
            else 1
        )
    finally:
        # No interpreter shutdown: handlers of the server are not the child's to run.
        os._exit(code)


def _kernel_kills() -> int:
    """Return how often the kernel killed for memory in this control group (v2, then v1) or else on this host."""
    files: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                of_group = (
                    "/memory.events" if controllers == "" else "/memory.oom_control"
                )
                files.append(f"/sys/fs/cgroup/{controllers}{path}{of_group}")
    for file in (*files, "/proc/vmstat"):
        with contextlib.suppress(OSError):
            if found := re.search(
                r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE
            ):
                return int(found[1])
    return 0


def serve(preload: dict[str, Any] | None = None) -> None:
    """Answer requests until standard input closes.

    ``preload`` replaces what the trainer's trials need: the ``function`` of a
    ``module``, which is called with ``options``, and whose result is the field
    ``preloaded`` of the first reply.
    """
    # Replies go to standard output; output of libraries goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    def ended(within_s: float) -> bool:
        # Nothing is asked meanwhile: this is the end.
        return bool(select.select([0], [], [], within_s)[0])

    keep_orphans()
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if preload is None:
        preload_trainer()
        versions["transformers"] = importlib.metadata.version("transformers")
    else:
        function = getattr(
            importlib.import_module(preload["module"]), preload["function"]
        )
        versions["preloaded"] = function(**preload["options"])
    send(versions)
    # Unbuffered, so that its end is seen in a trial.
    with open(0, "rb", buffering=0) as requests:
        for line in iter(requests.readline, b""):
            request = json.loads(line)
            if "modules" in request:
                before = psutil.Process().num_threads()
                # Imported late by a trial; as far as they can be imported here.
                for name in request["modules"]:
                    with contextlib.suppress(Exception, SystemExit):
                        importlib.import_module(name)
                send({"threads": psutil.Process().num_threads() - before})
                continue
            preload_model(
                request["measured"]
                .get("config", {})
                .get("model", {})
                .get("config", {})
                .get("model_type")
            )
            send(run_trial(request, ended))


# gloo's and NCCL's texts for another rank that is gone.
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken"
    r" pipe|gloo/transport|ncclRemote"
)


def run_job(
    job: str,
    result_file: Path,
    measured: dict[str, Any],
    local: dict[str, Any],
    *more: object,
) -> bool:
    """Run a job and write how it ended: ``status``, its details, and ``ended_s`` on the monotonic clock.

    ``job`` names a job, or a module by its full name, whose ``run`` gets ``measured``
    and ``local`` of the trial and ``more``, and returns figures. With ``first_attempt``
    in ``local``, the trial is tried again after a crash. A fault that may not be of
    memory is then a crash: near the limit little is free, and a broken kernel would
    pass for a smaller limit. Return True if the job measured its figures.
    """
    result: dict[str, Any]
    process = os.getpid()
    try:
        module = importlib.import_module(JOB_MODULES.get(job, job))
        result = {"status": "measured", "figures": module.run(measured, local, *more)}
        _lift_limit()
    except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an outcome
        _lift_limit()
        result = _failure(error, local.get("first_attempt", False))
    if os.getpid() != process:
        # A copy of the trial, which its own code has forked: there is one account, the
        # original's.
        os._exit(1)
    write_atomically(
        result_file, json.dumps(result | {"ended_s": time.monotonic()}), durable=False
    )
    return bool(result["status"] == "measured")


def _failure(error: Exception, first_attempt: bool) -> dict[str, Any]:
    if isinstance(error, TrainerError):
        told = {
            "message": error.message,
            "next_step": error.next_step,
            "exit_code": error.exit_code,
        }
        return {"status": "refused", **told}
    if (refusal := out_of_memory(error)) is not None:
        return {
            "status": (
                "crashed" if first_attempt and is_vague(refusal) else "out_of_memory"
            ),
            "detail": refusal,
        }
    # Not this rank's failure: that of the rank which it has lost.
    lost = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    return {
        "status": "lost_peer" if lost else "crashed",
        "detail": traceback.format_exc()[-2000:],
    }


def _lift_limit() -> None:
    """Lift the memory limit, as writing the account needs memory too."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    # Imported for children, which must not import anything near their memory limit.
    psutil.Process()
    serve(*map(json.loads, sys.argv[1:]))
    # Nothing is left to do, and taking torch apart would delay the parent by most of a
    # second.
    os._exit(0)
