"""The ``fault`` job: fails on purpose, in each way a trial can fail, so that the machinery can be tested for real."""

import multiprocessing
import os
import signal
import time
from typing import Any

import torch

from autotune.measure.jobs.budget import CpuBudget


def run(measured: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Fail as ``measured["fault"]`` says; ``none`` succeeds.

    Args:
        measured: ``fault``: none, allocate, hang, crash, signal or leave_child.
        place: ``pid_file``, where a left child's process id is written.
    """
    match measured["fault"]:
        case "allocate":
            CpuBudget(measured["budget_bytes"])
            torch.ones(measured["allocate_bytes"], dtype=torch.uint8)
        case "leave_child":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
            child.start()
            with open(place["pid_file"], "w") as file:  # noqa: PTH123 - a plain file in a test's own directory
                file.write(str(child.pid))
        case kind:
            fail(kind)
    return {"fault": measured["fault"]}


def fail(kind: str) -> None:
    """Fail here and now.

    Args:
        kind: none, hang, crash or signal.
    """
    match kind:
        case "hang":
            time.sleep(3600)
        case "crash":
            raise ValueError("a crash on purpose; this text mentions an error and is no out of memory")
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
