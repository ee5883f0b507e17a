"""A program of yours that torchrun starts, without anything of this project.

``torchrun --nproc-per-node 2 rank_program.py FUNCTION SIZE BYTES`` takes three steps of
a function of ``hostile.py``, under a memory limit of this many bytes for each rank.
"""

import resource
import sys
from pathlib import Path

import hostile
import torch
import torch._dynamo  # which torch's optimizers import

STEPS = 3


def used_bytes() -> int:
    """Return the data segment of this process, which the kernel limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields["VmData"].split()[0])


def main():
    name, size, limit_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    _, hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    soft_limit_bytes = used_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit_bytes, hard_limit_bytes))
    step = getattr(hostile, name)(size)
    for _ in range(STEPS):
        step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
