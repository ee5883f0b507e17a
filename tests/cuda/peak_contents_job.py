"""Contents of memory at the peak of steps on a GPU; ``test_peak_contents`` runs them.

``peak_contents_job.py CASE …`` prints a JSON line for each case: the contents, and the
allocator's own peak of the same step, with and without recording.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autotune.evidence.peak_contents import PeakContents
from autotune.memory.jobs.peak_contents import record_step

WIDTH = 256
LAYERS = 4
BATCH_SIZE = 4096
BIG_BYTES = 2**40


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, checkpointing=False, greedy=False):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.checkpointing = checkpointing
        self.greedy = greedy

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        if self.greedy:
            x = x + torch.empty(BIG_BYTES, dtype=torch.uint8, device=x.device).sum()
        return x


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    for case in sys.argv[1:]:
        print(json.dumps(figures_of(case, device)), flush=True)
    torch.distributed.destroy_process_group()


def figures_of(case: str, device: torch.device) -> dict[str, object]:
    model = Model(checkpointing=case == "checkpoint").to(device)
    step_model: nn.Module = model
    if case == "ddp":
        step_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if case == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    if case == "compile":
        step_model = torch.compile(model)
    if case == "compile_layers":
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(BATCH_SIZE, WIDTH, device=device)
    micro_batches = 2 if case == "accumulate" else 1

    def step() -> None:
        for _ in range(micro_batches):
            step_model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def peak_of(take: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        take()
        return torch.cuda.max_memory_allocated(device)

    for _ in range(3):
        step()
    alone_bytes = peak_of(step)
    model.greedy = case == "oom"
    contents: list[PeakContents] = []
    recorded_bytes = peak_of(
        lambda: contents.append(
            record_step(step, device, modules=[step_model], optimizers=[optimizer])
        )
    )
    torch.cuda.empty_cache()
    history = torch.cuda.memory._snapshot()["device_traces"][device.index]
    return {
        "contents": contents[0].model_dump(mode="json"),
        "alone_bytes": alone_bytes,
        "recorded_bytes": recorded_bytes,
        "history_entries": len(history),
    }


if __name__ == "__main__":
    main()
