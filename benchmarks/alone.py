"""Run a step on a GPU without autotune.

``python -m benchmarks.alone MODULE:FUNCTION SIZE [NAME=VALUE]`` prints ``ran``,
``retried`` if the allocator had to free cached blocks, or ``out of memory``.
"""

import importlib
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 3


class _EnoughSteps(BaseException):
    """Raised in a training loop."""


def main(name: str, size: str, *given: str) -> str:
    """Take the steps, or let a training function take them; return how that ended."""
    taken = []

    def stepped(*_: object) -> None:
        taken.append(1)
        if len(taken) >= STEPS:
            raise _EnoughSteps

    register_optimizer_step_post_hook(stepped)
    module, function = name.split(":")
    try:
        step = getattr(importlib.import_module(module), function)(
            int(size), "cuda", **dict(argument.split("=") for argument in given)
        )
        while True:
            step()
    except _EnoughSteps:
        counts = torch.cuda.memory_stats()
        return "retried" if counts["num_alloc_retries"] + counts["num_ooms"] else "ran"
    except torch.OutOfMemoryError:
        return "out of memory"


if __name__ == "__main__":
    sys.stdout.write(f"\n{main(*sys.argv[1:])}\n")
