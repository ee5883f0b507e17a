"""Ranks that measure together: they join once, then run the trials that the first rank reads, one after the other.

``torchrun -m autotune.trials.jobs.multirank_worker DIRECTORY DEVICE``. Request N is
``DIRECTORY/N/trial.json``; each rank writes how it ended to ``rank-R.json`` beside it.
A rank that fails ends, and torchrun ends the others.
"""

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
    number, measured = 0, True
    while measured:
        place = directory / str(number)
        told = ranks.broadcast_object(
            _next(place / "trial.json", directory / END, os.getppid())
            if ranks.leads
            else ""
        )
        if told == END:
            leave_ranks(together=True)
            return 0
        trial = json.loads(told)
        measured = run_job(
            trial["job"],
            place / f"rank-{ranks.rank}.json",
            trial["measured"],
            trial["local"],
            ranks,
        )
        number += 1
    return 1


def _next(request: Path, end: Path, parent: int) -> str:
    """Wait for the next request, for the file ``end``, or for the end of the parent process."""
    while not request.is_file():
        if end.exists() or os.getppid() != parent:
            return END
        time.sleep(POLL_S)
    return request.read_text()


def main() -> None:
    """Run one rank, which ends with the torchrun that started it, even while torch is being imported."""
    parent = os.getppid()
    end_with_parent(parent)
    # A torchrun that ended while starting its ranks has left this one to another
    # parent.
    if sys.argv[1].encode() not in Path(f"/proc/{parent}/cmdline").read_bytes():
        os._exit(1)
    code = serve(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    # At once: the others' connections end with this process.
    os._exit(code)


if __name__ == "__main__":
    main()
