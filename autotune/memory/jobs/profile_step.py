"""The ``kernels`` job: which kernels a step spends its time in.

The step is that of the ``step`` job, under torch's profiler. On a CPU, operators take
the place of kernels.
"""

from collections import defaultdict
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from autotune.memory.jobs.step import batches_of_step
from autotune.memory.values import KernelsRequest
from trainer.build import build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import join_ranks, leave_ranks

MAX_NAME_CHARACTERS = 160
"""Characters of a kernel's name that are kept, from its beginning."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Take steps under the profiler, together with the other ranks.

    Args:
        measured: A ``KernelsRequest``.
        local: ``environment`` and ``rendezvous``, as for the ``step`` job.

    Returns:
        The fields of ``KernelFigures``, of the first rank.
    """
    request = KernelsRequest.of(measured)
    config = request.config
    ranks = join_ranks(
        config,
        environment=local.get("environment", {}),
        rendezvous=local.get("rendezvous"),
    )
    training = build_training(config, request.vocab_size, request.special_ids, ranks)
    batches = batches_of_step(request, ranks)
    make_optimizer_state(training)
    training.step.rehearse(batches[0])
    on_gpu = ranks.device.type == "cuda"
    for number in range(request.warmup_steps):
        training.step.run(batches, learning_rate(config, number))
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for number in range(request.timed_steps):
            result = training.step.run(batches, learning_rate(config, number))
        # Waits for the device, so that the last kernels are in the profile.
        float(result.loss)
    kernels = _kernel_times(profiler, on_gpu=on_gpu, steps=request.timed_steps)
    leave_ranks(together=True)
    return {
        "kernels": kernels,
        "padded_tokens_per_step": len(batches)
        * config.micro_batch_size
        * config.seq_length_tokens,
    }


def _kernel_times(
    profiler: torch.profiler.profile, *, on_gpu: bool, steps: int
) -> list[dict[str, Any]]:
    """Return the calls and seconds of each kernel in a step, the longest first."""
    calls: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if on_gpu != (event.device_type == DeviceType.CUDA):
            continue
        time_us = event.device_time_total if on_gpu else event.self_cpu_time_total
        name = event.name[:MAX_NAME_CHARACTERS]
        calls[name] += 1 / steps
        seconds[name] += time_us / 1e6 / steps
    by_time = sorted(seconds, key=lambda name: seconds[name], reverse=True)
    return [
        {"name": name, "calls": calls[name], "seconds": seconds[name]}
        for name in by_time
        if seconds[name] > 0
    ]
