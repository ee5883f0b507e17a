"""The ``kernels`` job: the kernels that a step spends its time in, and their bounds.

The step is that of the ``step`` job, under torch's profiler. On a CPU, operators take
the place of kernels.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from autotune.kernels.decide.trace import kernels_of_trace
from autotune.kernels.jobs.measure_roofline import measure_roofline
from autotune.memory.jobs.step import batches_of_step
from autotune.memory.values import KernelsRequest
from trainer.build import build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.distributed.device_events import mark
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import join_ranks, leave_ranks


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Take steps, then as many under the profiler, together with the other ranks.

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
    # Before the model, which may leave little memory.
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    roofline = measure_roofline(ranks.device, dtype)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    training = build_training(config, request.vocab_size, request.special_ids, ranks)
    batches = batches_of_step(request, ranks)
    make_optimizer_state(training)
    training.step.rehearse(batches[0])
    step_s = []
    for number in range(request.warmup_steps + request.timed_steps):
        began = mark(ranks.device)
        result = training.step.run(batches, learning_rate(config, number))
        ended = mark(ranks.device)
        ended.wait()
        if number >= request.warmup_steps:
            step_s.append(ended.seconds_since(began))
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for number in range(request.timed_steps):
            result = training.step.run(batches, learning_rate(config, number))
        # Waits for the device, so that the last kernels are in the profile.
        float(result.loss)
    kernels = kernels_of_trace(
        trace_events(profiler),
        roofline,
        on_gpu=ranks.device.type == "cuda",
        steps=request.timed_steps,
        document_tokens=config.seq_length_tokens / request.documents_per_sequence,
    )
    leave_ranks(together=True)
    return {
        "kernels": [kernel.model_dump() for kernel in kernels],
        "padded_tokens_per_step": len(batches)
        * config.micro_batch_size
        * config.seq_length_tokens,
        "step_s": statistics.median(step_s),
        "roofline": roofline.model_dump(),
    }


def trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the events of a profile, in Chrome's trace format."""
    with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events
