"""Steps of compiled layers, with machine code; ``test_compiled`` runs them.

``compile_job.py DATA FAMILY=LAYERS[,KEY=VALUE …] …`` prints one JSON line for each
case: graphs, recompilations in later steps, misses of the compiler's cache, and Triton
kernels that a step launches, with those of them whose bytes a profile tells.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from autotune.evidence.kernels import KernelTime, Roofline
from autotune.kernels.decide.trace import kernels_of_trace
from autotune.memory.jobs.profile_step import trace_events
from testbed.nullgpu.counts import Counts
from tests.trainer.tiny_models import SHAPES, config_of, micro_batches
from trainer.build import build_training
from trainer.data.dataset import TokenDataset
from trainer.formats.train_config import ModelSettings
from trainer.graph_counter import GraphCounter
from trainer.runtime.ranks import join_ranks, leave_ranks

STEPS = 6


def main() -> None:
    dataset = TokenDataset.open(Path(sys.argv[1]))
    ranks = join_ranks(config_of(device="cuda"))
    for case in sys.argv[2:]:
        figures = run(dataset, ranks, case)
        if ranks.leads:
            print(json.dumps(figures), flush=True)
    leave_ranks(together=True)


def run(dataset, ranks, case) -> dict[str, object]:
    model, *settings = case.split(",")
    family, layers = model.split("=")
    changes: dict[str, Any] = dict(setting.split("=") for setting in settings)
    changes |= {key: True for key, value in changes.items() if value == "true"}
    strategy = changes.pop("strategy", "ddp")
    shape = SHAPES[family] | {"num_hidden_layers": int(layers)}
    config = config_of(
        model=ModelSettings(name="m", config=shape),
        device="cuda",
        precision="bf16",
        compile=True,
        parallel={"strategy": strategy},
        **changes,
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    training = build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )
    counter = GraphCounter()
    launches_before = 0
    for batch in micro_batches(dataset, config, steps=STEPS):
        launches_before = triton_launches()
        training.step.run([batch.to(ranks.device)], 1e-4)
        counter.stepped()
    launches = triton_launches() - launches_before
    torch.cuda.synchronize()
    profiled = [
        kernel
        for kernel in profiled_kernels(training, batch.to(ranks.device))
        if kernel.name.startswith("triton_")
    ]
    return {
        "case": case,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "recompilations": counter.recompilations,
        "cache_misses": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"],
        "triton_launches": launches,
        "triton_calls": sum(kernel.calls for kernel in profiled),
        "triton_calls_with_bytes": sum(
            kernel.calls for kernel in profiled if kernel.moved_bytes
        ),
    }


def profiled_kernels(training, batch) -> list[KernelTime]:
    """Return the operators of a profiled step; compiled kernels are among them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        training.step.run([batch], 1e-4)
    return kernels_of_trace(
        trace_events(profiler),
        Roofline(bytes_per_s=3e12, flops_per_s=7e14),
        on_gpu=False,
        steps=1,
        document_tokens=100.0,
    )


def triton_launches() -> int:
    """Return the Triton kernels that this process has launched so far."""
    counts = Counts.read([Path(os.environ["NULLGPU_COUNTS"]) / str(os.getpid())])
    return sum(
        number
        for (kind, name), number in counts.items()
        if kind == "kernel" and name.startswith("triton_")
    )


if __name__ == "__main__":
    main()
