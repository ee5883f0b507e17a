"""``python -m benchmarks.gpu_kernels --json FILE``: measure a GPU's constants.

The constants are those that a roofline needs: bandwidth, matmul and attention rates by
shape, the host's cost of a launch. The kernels of a training step are measured as well:
steps are profiled on random full sequences in bf16, and the host waits after each, as
the trainer does not.
"""

# mypy: disable-error-code="misc, no-any-return"
import argparse
import functools
import gc
import json
import operator
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.nn import functional

from autotune.subjects.mlm.jobs.worst_case import fullest_batch
from benchmarks.gpu.step_settings import step_config
from trainer.build import build_training
from trainer.formats.manifest import SpecialIds
from trainer.runtime.ranks import Ranks, join_ranks

SEQ_LENGTH, VOCAB_SIZE, DOCUMENTS = 512, 30_522, 2.0
WARM_UP, TIMED, PROFILED = 3, 8, 2
_FLOAT8, _NARROW = {"float8": "tensorwise"}, {"residual_dtype": "bf16"}
STEPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert-120m": ("bert-120m", 64, {}),
    "bert-350m": ("bert-350m", 64, {}),
    "modernbert-base": ("modernbert-base", 64, {}),
    "bert-120m, 8 sequences": ("bert-120m", 8, {}),
    "bert-120m, 8 sequences, CUDA graphs": (
        "bert-120m",
        8,
        {"compile_mode": "reduce-overhead"},
    ),
    "bert-120m, eager": ("bert-120m", 64, {"compile": False}),
    "bert-120m, bf16 residual": ("bert-120m", 64, _NARROW),
    "bert-120m, float8": ("bert-120m", 64, _FLOAT8),
    "bert-350m, float8": ("bert-350m", 64, _FLOAT8),
    "bert-120m, float8, bf16 residual": ("bert-120m", 64, _FLOAT8 | _NARROW),
}
"""Profiled steps, the most valuable first: model, sequences of its one micro-batch,
other settings."""
_ITEM = 2  # bytes of a bf16 number


def main() -> int:
    """Measure, print progress, write JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels", description="Measure a GPU's kernels."
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="begin no step's profile after this",
    )
    options = parser.parse_args()
    began_s = time.monotonic()
    ranks = join_ranks(step_config("bert-mini", 1, {"compile": False}), environment={})
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": {},
    }

    def section(
        name: str, measure: Callable[[], Any], into: dict[str, Any] = results
    ) -> None:
        try:
            into[name] = measure()
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            into[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        sys.stderr.write(f"{time.monotonic() - began_s:6.1f} s  {name}\n")

    section("launch_s", launches)
    section("bandwidth", bandwidths)
    section("matmul", matmuls)
    section("attention", attentions)
    section("adamw", adamw)
    for name, (model, size, settings) in STEPS.items():
        if time.monotonic() - began_s < options.seconds:
            measure = functools.partial(step, ranks, model, size, settings)
            section(name, measure, results["steps"])
    return 0


def seconds_of(work: Callable[[], object], repeats: int = 10) -> float:
    """Return the median seconds of a piece of work on the GPU.

    Two runs before are not timed.
    """
    for _ in range(2):
        work()
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def launches(number: int = 2000) -> dict[str, float]:
    """Return the host's time per operation, of the smallest ones: the GPU keeps up."""
    small, square = (
        torch.ones(16, device="cuda"),
        torch.ones(16, 16, device="cuda", dtype=torch.bfloat16),
    )
    weight = torch.ones(16, device="cuda", requires_grad=True)

    def graph() -> None:
        value = weight
        for _ in range(10):
            value = value * 1.0
        value.sum().backward()

    works: dict[str, tuple[Callable[[], object], int]] = {
        "elementwise": (lambda: small.add_(1.0), 1),
        "matmul": (lambda: torch.mm(square, square), 1),
        "forward_and_backward": (graph, 20),
    }
    seconds_by_work = {}
    for name, (work, operations) in works.items():
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number // operations):
            work()
        torch.cuda.synchronize()
        seconds_by_work[name] = (time.perf_counter() - began) / (
            number // operations * operations
        )
    return seconds_by_work


def bandwidths() -> list[dict[str, float]]:
    """Return bytes read and written per second, by the size of what is read."""
    rows = []
    for mib in (1, 4, 16, 64, 256, 1024, 4096):
        count = mib * 2**20 // _ITEM
        source, target = (
            torch.ones(count, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        half = torch.empty(count // 2, device="cuda", dtype=torch.float32).normal_()
        rows.append(
            {
                "mib": mib,
                "copy_bytes_per_s": (
                    2
                    * count
                    * _ITEM
                    / seconds_of(
                        lambda source=source, target=target: target.copy_(source)
                    )
                ),
                "gelu_bytes_per_s": (
                    2
                    * count
                    * _ITEM
                    / seconds_of(lambda source=source: functional.gelu(source))
                ),
                "cast_bytes_per_s": (
                    1.5
                    * count
                    * _ITEM
                    / seconds_of(lambda half=half: half.to(torch.bfloat16))
                ),
            }
        )
        del source, target, half
    return rows


def matmuls() -> list[dict[str, Any]]:
    """Return FLOP/s of an encoder's matmuls, by tokens and layer sizes.

    They are the one of forward and both of backward.
    """
    rows = []
    shapes = [
        (768, 768),
        (768, 2304),
        (768, 3072),
        (3072, 768),
        (1024, 1024),
        (1024, 3072),
        (1024, 4096),
        (4096, 1024),
    ]
    cases = [
        (tokens, *shape)
        for tokens in (2048, 4096, 16384, 32768, 131072)
        for shape in shapes
    ]
    cases += [
        (tokens, hidden, VOCAB_SIZE)
        for tokens in (640, 5120, 20480)
        for hidden in (768, 1024)
    ]
    for tokens, inner, outer in cases:
        value, weight, grad = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16)
            for size in ((tokens, inner), (outer, inner), (tokens, outer))
        )
        bias = torch.zeros(outer, device="cuda", dtype=torch.bfloat16)
        flops = 2 * tokens * inner * outer
        works: dict[str, Callable[[], object]] = {
            "forward": lambda v=value, w=weight, b=bias: functional.linear(v, w, b),
            "input_gradient": lambda g=grad, w=weight: g @ w,
            "weight_gradient": lambda g=grad, v=value: g.t() @ v,
        }
        rates = {
            f"{name}_flops_per_s": flops / seconds_of(work, 5)
            for name, work in works.items()
        }
        rows.append({"tokens": tokens, "in": inner, "out": outer} | rates)
    return rows


def attentions(size: int = 64) -> list[dict[str, Any]]:
    """Return times of attention by kernel, over ``size`` sequences.

    They are of forward, and of forward with backward.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = []
    for heads in (12, 16):
        parts = [
            torch.randn(
                size,
                heads,
                SEQ_LENGTH,
                64,
                device="cuda",
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for _ in range(3)
        ]
        flops = 4 * size * heads * SEQ_LENGTH**2 * 64

        def row(
            kernel: str,
            work: Callable[[], Any],
            flops: float = flops,
            heads: int = heads,
        ) -> None:
            with torch.no_grad():
                forward_s = seconds_of(work)

            def both() -> None:
                result = work()
                result.backward(torch.ones_like(result))

            rows.append(
                {
                    "kernel": kernel,
                    "heads": heads,
                    "forward_s": forward_s,
                    "both_s": seconds_of(both),
                    "forward_flops": flops,
                }
            )

        mask = torch.ones(
            size, 1, SEQ_LENGTH, SEQ_LENGTH, device="cuda", dtype=torch.bool
        ).tril(255)
        for backend, with_mask in (
            (SDPBackend.FLASH_ATTENTION, False),
            (SDPBackend.CUDNN_ATTENTION, False),
            (SDPBackend.EFFICIENT_ATTENTION, False),
            (SDPBackend.EFFICIENT_ATTENTION, True),
        ):
            with sdpa_kernel(backend):
                given = mask if with_mask else None
                row(
                    f"{backend.name}{'_MASK' if with_mask else ''}",
                    lambda parts=parts, given=given: (
                        functional.scaled_dot_product_attention(*parts, attn_mask=given)
                    ),
                )
        from torch.nn.attention.varlen import varlen_attn

        tokens = size * SEQ_LENGTH
        flat = [
            torch.randn(
                tokens,
                heads,
                64,
                device="cuda",
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for _ in "qkv"
        ]
        for document in (512, 256, 128, 64):
            edges = torch.arange(
                0, tokens + 1, document, device="cuda", dtype=torch.int32
            )
            row(
                f"varlen_{document}",
                lambda flat=flat, edges=edges, longest=document: varlen_attn(
                    *flat, cu_seq_q=edges, cu_seq_k=edges, max_q=longest, max_k=longest
                ),
                flops * document / SEQ_LENGTH,
            )
    return rows


def adamw() -> dict[str, float]:
    """Return the time of fused AdamW and of clipping per parameter.

    There are 100 fp32 tensors of 1.2 million numbers.
    """
    weights = [
        torch.zeros(1_200_000, device="cuda", requires_grad=True) for _ in range(100)
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    numbers = 120e6
    clip = seconds_of(lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0))
    return {
        "adamw_s_per_parameter": seconds_of(optimizer.step) / numbers,
        "clip_s_per_parameter": clip / numbers,
    }


def step(
    ranks: Ranks, model: str, size: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return step times and the kernels of a step.

    The step has one micro-batch, without accumulation.
    """
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    config = step_config(model, size, settings)
    special = SpecialIds(pad=0, cls=1, sep=2, mask=3, unk=4)
    training = build_training(config, VOCAB_SIZE, special, ranks)
    batches = [
        fullest_batch(
            config, VOCAB_SIZE, special, documents_per_sequence=DOCUMENTS
        ).pin_memory()
        for _ in range(4)
    ]
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for number in range(WARM_UP):
        training.step.run([batches[number % 4]], 1e-4)
    torch.cuda.synchronize()
    warm_up_s = time.perf_counter() - began
    times = []
    for number in range(TIMED):
        began = time.perf_counter()
        training.step.run([batches[number % 4]], 1e-4)
        launched_s = time.perf_counter() - began
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began, launched_s))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profiler:
        for number in range(PROFILED):
            training.step.run([batches[number % 4]], 1e-4)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        seconds = event.device_time_total / 1e6
        if seconds and event.device_type == DeviceType.CUDA:
            kernels[event.name[:160]][0] += 1 / PROFILED
            kernels[event.name[:160]][1] += seconds / PROFILED
    by_name = [
        {"name": name, "per_step": round(count, 1), "seconds": seconds}
        for name, (count, seconds) in kernels.items()
    ]
    step_s = statistics.median(whole_s for whole_s, _ in times)
    flops = training.work.step_flops(
        batches[0].tokens_N.numpy(), batches[0].predicted_tokens
    )
    return {
        "model": model,
        "micro_batch_size": size,
        "settings": settings,
        "warmup_s": warm_up_s,
        "step_s": step_s,
        "launched_s": statistics.median(launched for _, launched in times),
        "kernels_s": sum(seconds for _, seconds in kernels.values()),
        "tokens_per_s": size * SEQ_LENGTH / step_s,
        "model_flops": flops,
        "flops_per_s": flops / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "kernels": sorted(by_name, key=operator.itemgetter("seconds"), reverse=True),
    }


if __name__ == "__main__":
    sys.exit(main())
