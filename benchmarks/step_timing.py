"""Training steps on a GPU: their time, their kernels by group, and their memory.

Steps are on random full sequences of two documents each, in one micro-batch.
"""

import gc
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType

from autotune.subjects.mlm.jobs.worst_case import fullest_batch
from trainer.build import Training, build_training
from trainer.data.micro_batch import MicroBatch
from trainer.formats.gpu_peaks import peak_flops_per_s
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig
from trainer.runtime.ranks import Ranks

VOCAB_SIZE, DOCUMENTS = 30_522, 2.0
SPECIAL = SpecialIds(pad=0, cls=1, sep=2, mask=3, unk=4)
BATCHES, WARM_UP, PROFILED = 2, 3, 2
LEARNING_RATE = 1e-4
GROUPS = {
    "attention": r"flash|fmha|attention|attn",
    "matmul": r"gemm|nvjet|xmma|cutlass|triton_tem|splitk|quack",
    "layer_norm": r"layer_?norm|rms_?norm|gammabeta",
    "gelu": r"gelu",
    "copies_and_casts": r"^(?!.*softmax).*(copy|cast|memcpy|memset|_cat_)",
    "rest": r"",
}
"""Groups of kernels, by a pattern in their names; the first that matches."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """Steps of one configuration."""

    config: TrainConfig
    training: Training
    batches: list[MicroBatch]
    first_step_s: float = 0.0
    """Time of the first step, which compiles layers, in seconds."""
    times_s: list[float] = field(default_factory=list)
    """Time of a step in each window, in seconds."""

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> "Steps":
        """Build the model, and take the first steps."""
        training = build_training(config, VOCAB_SIZE, SPECIAL, ranks)
        steps = cls(config=config, training=training, batches=batches_of(config))
        steps.first_step_s = steps.window(1)
        steps.window(WARM_UP)
        return steps

    def window(self, count: int) -> float:
        """Take steps, wait for the GPU, and return the time of a step in seconds."""
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for number in range(count):
            batch = self.batches[number % len(self.batches)]
            self.training.step.run([batch], LEARNING_RATE)
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / count

    def figures(self) -> dict[str, Any]:
        """Return the figures of a step; times are medians over the windows."""
        step_s = statistics.median(self.times_s)
        tokens = self.config.micro_batch_size * self.config.seq_length_tokens
        batch = self.batches[0]
        flops = self.training.work.step_flops(
            batch.tokens_N.numpy(), batch.predicted_tokens
        )
        peak = peak_flops_per_s(torch.cuda.get_device_name(), "bf16")
        activation_bytes = self._activation_bytes()
        kernels = self.kernels_s()
        return {
            "first_step_s": self.first_step_s,
            "step_s": step_s,
            "windows_s": self.times_s,
            "tokens_per_s": tokens / step_s,
            "model_flops_per_s": flops / step_s,
            "mfu_share": flops / step_s / peak if peak else None,
            "activation_bytes": activation_bytes,
            "kernels_s": grouped(kernels),
            "longest_kernels_s": dict(list(kernels.items())[:12]),
        }

    def _activation_bytes(self) -> int:
        """Return the memory that a step takes beside weights and optimizer state."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.window(1)
        return torch.cuda.max_memory_allocated() - before

    def kernels_s(self) -> dict[str, float]:
        """Return the seconds of each kernel in a step, the longest first."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            self.window(PROFILED)
        seconds: dict[str, float] = defaultdict(float)
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA and event.device_time_total:
                name = event.name[:160]
                seconds[name] += event.device_time_total / 1e6 / PROFILED
        return dict(sorted(seconds.items(), key=lambda item: item[1], reverse=True))


def batches_of(config: TrainConfig) -> list[MicroBatch]:
    """Return micro-batches of a configuration, in pinned memory."""
    return [
        fullest_batch(
            config, VOCAB_SIZE, SPECIAL, documents_per_sequence=DOCUMENTS
        ).pin_memory()
        for _ in range(BATCHES)
    ]


def grouped(kernels_s: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each group of kernels."""
    seconds = dict.fromkeys(GROUPS, 0.0)
    for name, kernel_s in kernels_s.items():
        seconds[group_of(name)] += kernel_s
    return seconds


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    return next(
        group
        for group, pattern in GROUPS.items()
        if re.search(pattern, kernel, re.IGNORECASE)
    )


def clear_compiler() -> None:
    """Forget compiled layers, and free the memory of what is no longer used."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
