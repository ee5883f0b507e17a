"""Ranks that measure together: they join once, then run one trial after the other.

``torchrun -m autotune.trials.jobs.multirank_worker DIRECTORY DEVICE``. Request N is
``DIRECTORY/N/trial.json``; each rank writes how it ended to ``rank-R.json`` beside it.
The first rank reads the requests for all. A rank that fails ends, and torchrun ends the
others.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

from autotune.base.process import end_with_parent
from autotune.trials.jobs.server import run_job
from trainer.config.train_config import TrainConfig
from trainer.files import write_atomically

END = "end"
"""Name of the file that ends the ranks, and the request that tells them."""
POLL_S = 0.01


def serve(directory: Path, device: str) -> int:
    """Join the other ranks, and run trials until there are no more.

    Return the exit code.
    """
    import torch
    import transformers

    from trainer.distributed.ranks import join_ranks, leave_ranks

    # The least configuration for joining, without a timeout: the parent decides how
    # long a trial may take.
    joining = {
        "model": {"name": "none", "config": {"model_type": "none"}},
        "device": device,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "parallel": {"timeout_s": 86400.0},
    }
    ranks = join_ranks(TrainConfig.model_validate(joining))
    if ranks.leads:
        versions = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
        }
        write_atomically(
            directory / "joined.json", json.dumps({"versions": versions}), durable=False
        )
    for number in itertools.count():
        trial_directory = directory / str(number)
        request = ""
        if ranks.leads:
            request = _next_request(
                trial_directory / "trial.json", directory / END, os.getppid()
            )
        request = ranks.broadcast_object(request)
        if request == END:
            leave_ranks(together=True)
            return 0
        trial = json.loads(request)
        measured = run_job(
            trial["job"],
            trial_directory / f"rank-{ranks.rank}.json",
            trial["measured"],
            trial["local"],
            ranks,
        )
        if not measured:
            break
    return 1


def _next_request(request_file: Path, end_file: Path, parent_pid: int) -> str:
    """Wait for the next request and return it.

    Return ``END`` once ``end_file`` exists or the parent process has ended.
    """
    while not request_file.is_file():
        if end_file.exists() or os.getppid() != parent_pid:
            return END
        time.sleep(POLL_S)
    return request_file.read_text()


def main() -> None:
    """Run one rank, which ends with the torchrun that started it.

    It ends with it even while torch is being imported.
    """
    directory, device = sys.argv[1:]
    parent_pid = os.getppid()
    end_with_parent(parent_pid)
    # A torchrun that ended while starting its ranks has left this one to another
    # parent.
    if directory.encode() not in Path(f"/proc/{parent_pid}/cmdline").read_bytes():
        os._exit(1)
    exit_code = serve(Path(directory), device)
    sys.stdout.flush()
    # At once: the others' connections end with this process.
    os._exit(exit_code)


if __name__ == "__main__":
    main()
