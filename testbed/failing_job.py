"""A job that fails on purpose, in each way a trial can fail.

It fails by itself, or in one rank of a step job of the trainer.
``torchrun -m testbed.failing_job TRIAL.json OUT`` takes the ranks of a step job as
torchrun starts them.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from autotune.memory.jobs import step
from autotune.subjects.mlm.jobs import step as trainer_step
from autotune.trials.jobs.budget import CpuBudget
from autotune.trials.jobs.preload import preload_model, preload_trainer
from autotune.trials.jobs.run_job import run_job

LIMIT_S = 200.0
"""Time limit of a trial that torchrun starts."""


def run(measured, local):
    """Fail by ``fault``, or run a step job if there is a function that builds one."""
    if "function" in measured:
        return _run_step(measured, local)
    fault = measured["fault"]
    if fault == "allocate":
        CpuBudget(measured["budget_bytes"])
        torch.ones(measured["allocate_bytes"], dtype=torch.uint8)
    if fault == "leave_child":
        child = multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(3600,)
        )
        child.start()
        Path(local["pid_file"]).write_text(str(child.pid))
    if fault == "leave_daemon":
        # In its own session, so that no signal to the rank's group reaches it.
        daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        Path(local["pid_file"]).write_text(str(daemon.pid))
        fail("hang")
    fail(fault)
    return {"fault": fault}


def _run_step(measured, local):
    """Run a step job whose ranks have their own budgets, and faults after a step."""
    rank = local.get("environment", {}).get("RANK", "0")
    fault = local.get("fault_by_rank", {}).get(rank, "none")
    learning_rate = trainer_step.learning_rate

    def fail_after_a_step(config, number):
        if number:
            fail(fault)
        return learning_rate(config, number)

    # The trainer's step asks for the learning rate before each step.
    trainer_step.learning_rate = fail_after_a_step
    measured = {name: value for name, value in measured.items() if name != "fault"}
    budgets_bytes = local.get("budget_bytes_by_rank")
    if budgets_bytes:
        measured["memory_budget_bytes"] = budgets_bytes[int(rank)]
    return step.run(measured, local)


def fail(fault):
    if fault == "hang":
        time.sleep(3600)
    if fault == "crash":
        raise ValueError(
            "a crash on purpose; this text mentions an error and is no out of memory"
        )
    if fault == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault.startswith("raise "):
        raise RuntimeError(fault.removeprefix("raise "))


def main():
    measured = json.loads(Path(sys.argv[1]).read_text())
    result_file = Path(sys.argv[2]) / f"rank-{os.environ['RANK']}.json"
    # Imports do not count towards a budget, as in a trial that is forked.
    preload_trainer()
    config = measured["arguments"].get("config")
    if config is not None:
        preload_model(config["model"]["config"]["model_type"])
    local = {
        "environment": dict(os.environ),
        "rendezvous": str(result_file.with_name("rendezvous")),
        "limit_s": LIMIT_S,
        "directory": None if config is not None else str(Path.cwd()),
    }
    has_measured = run_job("step", result_file, measured, local)
    # At once: the others' connections end with this process, and torchrun ends the
    # others when one has failed.
    os._exit(0 if has_measured else 1)


if __name__ == "__main__":
    main()
