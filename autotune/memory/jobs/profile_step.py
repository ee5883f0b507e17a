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

from autotune.kernels.decide.trace import (
    MatmulFormat,
    kernels_of_trace,
    matmul_format,
)
from autotune.kernels.jobs.measure_roofline import (
    RateFormat,
    allows_tf32,
    measure_roofline,
    rate_formats,
)
from autotune.memory.jobs.step import begin
from autotune.memory.values import KernelsRequest
from autotune.subjects.jobs import load
from autotune.subjects.own.subject import LOOP
from autotune.subjects.subject import StepFacts
from trainer.formats.errors import BadConfig
from trainer.runtime.device_events import mark


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Take steps, then as many under the profiler, together with the other ranks.

    Args:
        measured: A ``KernelsRequest``.
        local: As for the ``step`` job.

    Returns:
        The fields of ``KernelFigures``, of the first rank.

    Raises:
        BadConfig: If the function builds no step that can be called.
    """
    request = KernelsRequest.of(measured)
    build, group, arguments = begin(request, local)
    # Before the model, which may leave little memory. The matmul format is known
    # afterwards.
    rooflines = {
        name: measure_roofline(group.device, name)
        for name in rate_formats(group.device.type)
    }
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    step = build(**load.accepted(build, arguments))
    if not callable(step) or hasattr(step, LOOP):
        raise BadConfig(
            f"{request.function} is a training loop, whose kernels are not profiled",
            next_step="Return a function that takes one optimizer step.",
        )
    facts = getattr(step, "autotune_facts", StepFacts())
    if facts.prepare is not None:
        facts.prepare()
    step_s = []
    for number in range(request.steps):
        began = mark(group.device)
        step()
        ended = mark(group.device)
        ended.wait()
        if number >= request.warmup_steps:
            step_s.append(ended.seconds_since(began))
    activities = [ProfilerActivity.CPU]
    if group.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(request.timed_steps):
            step()
        # So that the last kernels are in the profile.
        mark(group.device).wait()
    events = trace_events(profiler)
    roofline = rooflines[_rate_format(matmul_format(events), group.device)]
    kernels = kernels_of_trace(
        events,
        roofline,
        on_gpu=group.device.type == "cuda",
        steps=request.timed_steps,
        document_tokens=request.document_tokens,
    )
    if facts.end is not None:
        facts.end()
    micro_batches = facts.micro_batches or 1
    return {
        "kernels": [kernel.model_dump() for kernel in kernels],
        "units_per_step": request.size * request.units_per_size * micro_batches,
        "step_s": statistics.median(step_s),
        "roofline": roofline.model_dump(),
    }


def _rate_format(found: MatmulFormat, device: torch.device) -> RateFormat:
    """Return the format at whose rate matmuls of a trace run.

    Those in fp32 run in TF32 on a GPU whose step has allowed it.
    """
    if found == "fp32" and device.type == "cuda" and allows_tf32():
        return "tf32"
    return found


def trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the events of a profile, in Chrome's trace format."""
    with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events
