"""A job that fails on purpose, in each way a trial can fail: by itself, or in one rank
of a step job.

``torchrun -m testbed.failing_job TRIAL.json OUT`` takes the ranks of a step job as
torchrun starts them.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

from autotune.memory.jobs import step
from autotune.trials.jobs.budget import CpuBudget
from autotune.trials.jobs.server import preload_model, preload_trainer, run_job


def run(measured, local):
    """Fail as ``fault`` says, or take a step job whose ranks have budgets and, after a
    step, faults of their own."""
    if "config" in measured:
        rank, next_rate = (
            local.get("environment", {}).get("RANK", "0"),
            step.learning_rate,
        )

        def fail_after_a_step(config, number):
            if number:
                fail(local.get("fault_by_rank", {}).get(rank, "none"))
            return next_rate(config, number)

        step.learning_rate = fail_after_a_step
        budgets = local.get("budget_bytes_by_rank")
        own = {"memory_budget_bytes": budgets[int(rank)]} if budgets else {}
        return step.run(
            {name: one for name, one in (measured | own).items() if name != "fault"},
            local,
        )
    if measured["fault"] == "allocate":
        CpuBudget(measured["budget_bytes"])
        torch.ones(measured["allocate_bytes"], dtype=torch.uint8)
    if measured["fault"] == "leave_child":
        child = multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(3600,)
        )
        child.start()
        Path(local["pid_file"]).write_text(str(child.pid))
    fail(measured["fault"])
    return {"fault": measured["fault"]}


def fail(kind):
    if kind == "hang":
        time.sleep(3600)
    if kind == "crash":
        raise ValueError(
            "a crash on purpose; this text mentions an error and is no out of memory"
        )
    if kind == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind.startswith("raise "):
        raise RuntimeError(kind.removeprefix("raise "))


if __name__ == "__main__":
    MEASURED, RESULT = (
        json.loads(Path(sys.argv[1]).read_text()),
        Path(sys.argv[2]) / f"rank-{os.environ['RANK']}.json",
    )
    # Imports are nobody's budget, as in a trial that is forked.
    preload_trainer()
    preload_model(MEASURED["config"]["model"]["config"]["model_type"])
    # At once: the others' connections end with this process, and torchrun ends the
    # others when one has failed.
    os._exit(
        0 if run_job("step", RESULT, MEASURED, {"environment": dict(os.environ)}) else 1
    )
