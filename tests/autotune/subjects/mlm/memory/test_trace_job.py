"""The ``trace`` job, which traces several micro-batch sizes of a model."""

from typing import Any

import pytest
import torch
from torch.optim import optimizer

from autotune.memory.values import Trace
from autotune.subjects.mlm.jobs import trace as trace_job
from testbed.simulators.allocator import SPECIAL_IDS
from tests.autotune.subjects.mlm.memory.traced_steps import (
    BASE,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
)

SIZES = [2, 5]
"""Requested micro-batch sizes."""


def run_job() -> dict[str, Any]:
    """Return the figures of a job that traces two sizes on one of two GPUs."""
    config = BASE.config.model_dump(mode="json")
    request = {
        "config": config | {"device": "cuda", "precision": "bf16"},
        "vocab_size": BASE.vocab_size,
        "special_ids": SPECIAL_IDS.model_dump(),
        "sizes": SIZES,
        "micro_batches": 3,
        "documents_per_sequence": 2.0,
        "ranks": 2,
    }
    return trace_job.run(request, {})


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return run_job()


def test_job_traces_every_requested_size(figures):
    traces = figures["traces"]
    assert [Trace.of(trace).micro_batch_size for trace in traces] == SIZES
    # The trace in the trial log is the whole trace.
    assert [Trace.of(trace).to_json() for trace in traces] == traces


def test_job_describes_the_model(figures):
    assert figures["attention"] == "varlen"
    # The model also has positions, biases and layer norms.
    attention_weights = 4 * HIDDEN**2
    mlp_weights = 2 * HIDDEN * INTERMEDIATE
    weights = BASE.vocab_size * HIDDEN + LAYERS * (attention_weights + mlp_weights)
    assert weights < figures["parameters"] < 1.5 * weights


def test_job_leaves_torch_as_it_was():
    # The job replaces this private function of torch while it traces.
    supported_devices = optimizer._get_fused_kernels_supported_devices
    run_job()
    assert optimizer._get_fused_kernels_supported_devices is supported_devices
    assert torch.empty(2).device.type == "cpu"
